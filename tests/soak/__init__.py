"""A long run with faults, whose processes must not grow: python -m tests.soak."""
