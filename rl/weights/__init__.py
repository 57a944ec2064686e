"""Push weights to vLLM, load them there, and verify that they arrived."""
