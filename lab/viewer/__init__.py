"""view.py: show what a run said and what training did with it, in the browser or as one file."""
