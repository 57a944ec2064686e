"""Advantages of the K rollouts of one group, from their rewards. No torch.

    group_mean      A = R - mean
    group_zscore    A = (R - mean) / (std + epsilon)       std with Bessel's correction
    rloo            A = R - mean of the others = K / (K - 1) * (R - mean)
    max_rl          A = (R - mean) / mean
    none            A = R

Per turn, where r_t is the reward of turn t (rl/rollouts/credit.py):

    turn_group_mean    A_t = G_t - mean of G_t over the rollouts that have a turn t
                       G_t = r_t + discount * G_{t+1}, the return from turn t on

An unscorable rollout (reward None, NaN or infinite) does not count in mean, std and K and gets 0.
With a baseline, a group gives zeros if it has fewer than two scorable rollouts, or a spread of at
most 1e-6, because a z-score would amplify rounding errors. `none` returns the reward itself.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, TypeGuard

from msgspec import Meta

SPREAD_TOLERANCE = 1e-6


def group_mean(rewards: Sequence[float | None]) -> list[float]:
    """Return the reward minus the group's mean. Dr.GRPO, arXiv:2503.20783."""
    return _compared(rewards, _centred)


def group_zscore(rewards: Sequence[float | None], *, epsilon: float) -> list[float]:
    """Return the reward minus the mean, in standard deviations. GRPO, arXiv:2402.03300."""

    def zscores(scorable: list[float]) -> list[float]:
        centred = _centred(scorable)
        std = math.sqrt(math.fsum(c * c for c in centred) / (len(scorable) - 1))
        return [c / (std + epsilon) for c in centred]

    return _compared(rewards, zscores)


def rloo(rewards: Sequence[float | None]) -> list[float]:
    """Return the reward minus the mean of the others, an unbiased baseline. arXiv:2402.14740."""

    def leave_one_out(scorable: list[float]) -> list[float]:
        scale = len(scorable) / (len(scorable) - 1)
        return [scale * c for c in _centred(scorable)]

    return _compared(rewards, leave_one_out)


def max_rl(rewards: Sequence[float | None]) -> list[float]:
    """Return (reward - mean) / mean, so that rare successes weigh most. arXiv:2602.02710.

    The result lies within -1..K-1. Raise ValueError if a reward is negative, because the mean could
    then be zero or negative.
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
    """Return the reward itself, for demonstrations with reward 1 and for shaped returns."""
    return [float(r) if _is_scorable(r) else 0.0 for r in rewards]


def turn_group_mean(
    rewards: Sequence[Sequence[float] | None], *, discount: Annotated[float, Meta(ge=0, le=1)]
) -> list[list[float]]:
    """Return for each turn its return to go minus the mean of the group's returns at this turn.

    Rewards of earlier turns do not count. With one turn the result is `group_mean`. So it is with
    discount 1, if all rollouts have equally many turns and only the last one earns. Turn-level
    advantages: arXiv:2505.11821; return to go: Sutton and Barto, chapter 13.

    A turn gets 0 if fewer than two rollouts have that turn, or if all their returns are equal. An
    unscorable rollout gets an empty list.

    Args:
        rewards: the reward of each turn of each rollout; None: unscorable.
        discount: factor of the next turn's return, 0..1. 0: each turn counts by itself.
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
    """Return the formula of the scorable rewards; 0 for the rest and for equal rewards."""
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
