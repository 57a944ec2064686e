"""Package for the terminal output of a run."""
