"""Package for the command line. It composes configurations and explains Hydra's errors."""
