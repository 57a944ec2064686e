"""Package that makes rollouts: vLLM samples them, or they are built from demonstrations."""
