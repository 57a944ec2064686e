"""The code of optimize_prompt.py: search for a better system prompt with GEPA."""
