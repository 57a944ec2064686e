"""What the tests of the verifiers bridges share."""
