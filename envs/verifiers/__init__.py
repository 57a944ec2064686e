"""Environments of the `verifiers` library, both of its generations."""
