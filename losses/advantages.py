"""Advantages of the K rollouts of one group, from their rewards. No torch.

    group_mean      A = R - mean
    group_zscore    A = (R - mean) / (std + epsilon)       std with Bessel's correction
    rloo            A = R - mean of the others = K / (K - 1) * (R - mean)
    max_rl          A = (R - mean) / mean
    none            A = R

By turn, r_t being what turn t earned (rl/rollouts/credit.py):

    turn_group_mean    A_t = G_t - mean of G_t over the rollouts that have a turn t
                       G_t = r_t + discount * G_{t+1}, what is still earned from turn t on

An unscorable rollout (reward None, NaN or infinite) stays out of mean, std and K and gets 0.
Where a baseline is subtracted, a group with fewer than two scorable rollouts, or with a spread of
at most 1e-6, gives zeros: a difference of rounding must not be blown up into a lesson. `none`
compares nothing and always returns the reward itself.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeGuard

SPREAD_TOLERANCE = 1e-6
# What the rules of a configuration must know (rl/config/facts.py): which compare the rollouts of a
# group, so that a group of one teaches nothing, and which take no negative reward.
COMPARES = ("group_mean", "group_zscore", "rloo", "max_rl", "turn_group_mean")
NON_NEGATIVE = ("max_rl",)
NEUTRAL = ("none",)  # the reward itself: what a critic starts from
RANGES = {"discount": ">= 0 and <= 1"}
PER_TURN = ("turn_group_mean",)  # rewards by turn in, one number a turn out


def group_mean(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the group's mean. Dr.GRPO, arXiv:2503.20783."""
    return _compared(rewards, _centred)


def group_zscore(rewards: Sequence[float | None], *, epsilon: float) -> list[float]:
    """Reward minus the mean, in standard deviations. GRPO, arXiv:2402.03300."""

    def zscores(scorable: list[float]) -> list[float]:
        centred = _centred(scorable)
        std = math.sqrt(math.fsum(c * c for c in centred) / (len(scorable) - 1))
        return [c / (std + epsilon) for c in centred]

    return _compared(rewards, zscores)


def rloo(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean of the others, an unbiased baseline. RLOO, arXiv:2402.14740."""

    def leave_one_out(scorable: list[float]) -> list[float]:
        scale = len(scorable) / (len(scorable) - 1)
        return [scale * c for c in _centred(scorable)]

    return _compared(rewards, leave_one_out)


def max_rl(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean, relative to the mean: rare successes weigh most. arXiv:2602.02710.

    Lies within -1..K-1 for rewards that are not negative; a negative one is a ValueError, for the
    mean could then be zero or turn every sign around.
    """

    def relative(scorable: list[float]) -> list[float]:
        if min(scorable) < 0:
            raise ValueError(
                f"advantage=max_rl needs rewards >= 0, got {min(scorable)}: "
                "use advantage=group_mean or shift the rewards"
            )
        mean = math.fsum(scorable) / len(scorable)  # > 0: none is negative, and not all are equal
        return [c / mean for c in _centred(scorable)]

    return _compared(rewards, relative)


def none(rewards: Sequence[float | None]) -> list[float]:
    """The reward itself, without a baseline: demonstrations with reward 1, shaped returns."""
    return [float(r) if _is_scorable(r) else 0.0 for r in rewards]


def turn_group_mean(
    rewards: Sequence[Sequence[float] | None], *, discount: float
) -> list[list[float]]:
    """What each turn and those after it earned, less what the group's others earned from there on.

    A turn is not blamed for what was earned before it. With one turn, or discount 1 and everything
    earned by the last of equally many turns, it is `group_mean`. Turn-level advantages:
    arXiv:2505.11821; return to go: Sutton and Barto, chapter 13.

    Args:
        rewards: of each rollout what each of its turns earned; None: unscorable.
        discount: of what the next turn earns, 0..1. 0: each turn for itself.

    Returns:
        One number a turn of each rollout. 0 where fewer than two rollouts have that turn, or all
        that do go on to earn the same; none at all for an unscorable rollout.

    """
    returns = [_returns(turns, discount) for turns in rewards]
    longest = max(map(len, returns), default=0)
    columns = [
        group_mean([turns[t] if t < len(turns) else None for turns in returns])
        for t in range(longest)
    ]
    return [[column[i] for column in columns[: len(turns)]] for i, turns in enumerate(returns)]


def _returns(turns: Sequence[float] | None, discount: float) -> list[float]:
    backwards = accumulate(reversed(turns or []), lambda later, now: now + discount * later)
    return list(backwards)[::-1]


def _compared(
    rewards: Sequence[float | None], formula: Callable[[list[float]], list[float]]
) -> list[float]:
    """The formula on the scorable rewards, 0 for the rest and for a group that compares nothing."""
    scorable = [r for r in rewards if _is_scorable(r)]
    if len(scorable) < 2 or max(scorable) - min(scorable) <= SPREAD_TOLERANCE:
        return [0.0] * len(rewards)
    advantages = iter(formula(scorable))
    return [next(advantages) if _is_scorable(r) else 0.0 for r in rewards]


def _centred(scorable: list[float]) -> list[float]:
    mean = math.fsum(scorable) / len(scorable)
    return [r - mean for r in scorable]


def _is_scorable(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)
