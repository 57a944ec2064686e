"""A baseline that outliers do not move: a quantile of the group's rewards instead of their mean.

    A = R - quantile(R of the group)

With rewards of 0 and 1 it asks "was that better than usual?" of hard examples and "was that worse?"
of easy ones: below a share of 1 - quantile right answers the baseline is 0 and only these are
reinforced, above it is 1 and only the wrong ones are discouraged.
"""

import math
from collections.abc import Sequence


def quantile(rewards: Sequence[float | None], *, quantile: float) -> list[float]:
    """Reward minus the smallest reward that a share `quantile` of the group does not exceed."""
    # None: the environment failed. Such a rollout stays out of the baseline and gets 0.
    scorable = sorted(reward for reward in rewards if reward is not None)
    if not scorable:
        return [0.0] * len(rewards)
    rank = max(1, math.ceil(quantile * len(scorable)))
    baseline = scorable[rank - 1]
    return [0.0 if reward is None else reward - baseline for reward in rewards]
