"""The trainer process (`python -m rl.trainer <run folder>`): loop, checkpoints, loggers."""
