"""optimize_prompt.py: search for a better system prompt by GEPA."""
