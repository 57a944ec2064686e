"""Support for environments of the `verifiers` library, in its classic API and its v1 API."""
