"""The command line: compose configurations with Hydra, and explain errors in one sentence."""
