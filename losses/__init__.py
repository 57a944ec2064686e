"""Token losses, advantages, aggregation, KL estimators, corrections: one formula per file.

This file imports nothing, so that `losses.advantages` and `losses.aggregation` need no torch.
"""
