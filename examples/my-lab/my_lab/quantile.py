"""A baseline that is robust to outliers: a quantile of the group's rewards instead of their mean.

    A = R - quantile(R of the group)

With rewards of 0 and 1, hard examples reinforce right answers and easy examples discourage wrong
answers. If the share of right answers is below 1 - quantile, the baseline is 0 and only right
answers have an advantage. Above it the baseline is 1, and only wrong answers have an advantage.
"""

import math

from losses.groups import ScoredGroup


def quantile(group: ScoredGroup, *, quantile: float) -> list[float]:
    """Return R - b for each reward R. b: the smallest reward >= a share `quantile` of all R."""
    # A rollout without a reward (None) gets 0 and does not count in the baseline.
    scorable = sorted(reward for reward in group.rewards if reward is not None)
    if not scorable:
        return [0.0] * len(group.rewards)
    rank = max(1, math.ceil(quantile * len(scorable)))
    baseline = scorable[rank - 1]
    return [0.0 if reward is None else reward - baseline for reward in group.rewards]
