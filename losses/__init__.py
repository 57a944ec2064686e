"""Formulas of token losses, advantages, token weights, KL estimators and corrections.

This file imports nothing, so that `losses.advantages` and `losses.aggregation` need no torch.
"""
