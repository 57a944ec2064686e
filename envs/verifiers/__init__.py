"""Package that plays environments of the `verifiers` library, of its classic API and of v1."""
