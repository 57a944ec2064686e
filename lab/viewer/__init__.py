"""The code of view.py: show rollouts and training records in the browser or in one file."""
