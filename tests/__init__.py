"""Sentences about the code; `-m server` runs the real vLLM."""
