"""Process: the loop, checkpoints, loggers. `python -m rl.trainer <run folder>`."""
