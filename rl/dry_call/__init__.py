"""The dry call, which calls components of a run with made-up values before the run trains."""
