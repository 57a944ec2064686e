"""Package that plays environments of the library `verifiers`, of its classic API or its API v1."""
