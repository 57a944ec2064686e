"""Output on the terminal while a run trains."""
