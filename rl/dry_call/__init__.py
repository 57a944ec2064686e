"""The dry call, which calls each component of a run with made-up values before the run starts."""
