"""The push, what receives it inside vLLM, the proof that it arrived."""
