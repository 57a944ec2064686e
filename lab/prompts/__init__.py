"""Package behind optimize_prompt.py, which searches for a better system prompt with GEPA."""
