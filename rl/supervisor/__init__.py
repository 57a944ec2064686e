"""The supervisor process: it prepares a run, starts the run's processes and watches them."""
