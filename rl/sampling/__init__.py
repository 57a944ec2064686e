"""Package that samples the rollouts of an example from vLLM or from demonstrations."""
