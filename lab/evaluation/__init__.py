"""The code of evaluate.py: evaluate a policy on held-out examples without training it."""
