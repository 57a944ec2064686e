"""Package for the command line. It composes configurations with Hydra and explains Hydra's errors."""
