"""vLLM: starting it, asking it."""
