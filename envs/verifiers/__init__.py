"""Package that plays environments of the `verifiers` library, of its classic API or its API v1."""
