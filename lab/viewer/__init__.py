"""The code of view.py: show rollouts and their tokens in the browser, or export them to a file."""
