"""The terminal output while a run trains."""
