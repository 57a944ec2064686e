"""Start vLLM and send requests to it."""
