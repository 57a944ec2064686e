"""The formulas of training: token losses, advantages, token weights, KL estimators, and
corrections for the difference between trainer and vLLM.
"""
