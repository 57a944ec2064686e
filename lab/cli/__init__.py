"""Package for the command line: composes configurations with Hydra and explains its errors."""
