"""Package that evaluates policies on held-out examples, in a training run or by evaluate.py."""
