"""Package behind evaluate.py, which evaluates a policy on held-out examples without training it."""
