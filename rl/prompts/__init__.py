"""A better system prompt for an environment, looked for by GEPA."""
