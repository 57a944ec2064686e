"""The maths: token losses, advantages, aggregation, KL estimators, corrections. One formula a file.

Nothing is imported here, so `losses.advantages` and `losses.aggregation` load without torch.
"""
