"""Package that starts vLLM and sends requests to it."""
