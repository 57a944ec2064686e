"""evaluate.py: play a policy on held-out examples, without training."""
