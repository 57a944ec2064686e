"""The dry call: each component of a run is called with made-up values before the run starts."""
