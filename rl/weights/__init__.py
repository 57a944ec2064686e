"""Push weights to vLLM, receive them there, and prove that they arrived."""
