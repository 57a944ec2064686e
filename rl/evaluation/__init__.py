"""Held-out examples: periodic, and as a command."""
