"""Advantages A of the K rollouts of one group, computed from their rewards R without torch.

    group_mean      A = R - mean
    group_zscore    A = (R - mean) / (std + epsilon)       std with Bessel's correction
    rloo            A = R - mean of the other rewards = K / (K - 1) * (R - mean)
    max_rl          A = (R - mean) / mean
    none            A = R

One advantage per turn t, where r_t is the reward of turn t (rl/rollouts/credit.py):

    turn_group_mean    A_t = G_t - mean of G_t over the rollouts that have a turn t
                       G_t = r_t + discount * G_{t+1}, the return from turn t on

An unscorable rollout (reward None, NaN or infinite) has advantage 0 and is left out of mean, std
and K. All formulas except `none` return zeros for a group with fewer than two scorable rollouts.
They also return zeros if the rewards differ by at most 1e-6, because a z-score would amplify
rounding errors.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, TypeGuard

from msgspec import Meta

from losses.groups import SPREAD_TOLERANCE, ScoredGroup


def group_mean(group: ScoredGroup) -> list[float]:
    """Return each reward minus the group's mean. Dr.GRPO, arXiv:2503.20783."""
    return _apply_formula(group.rewards, _subtract_mean)


def group_zscore(group: ScoredGroup, *, epsilon: float) -> list[float]:
    """Return (reward - mean) / (standard deviation + epsilon). GRPO, arXiv:2402.03300."""

    def zscores(scorable: list[float]) -> list[float]:
        centred = _subtract_mean(scorable)
        std = math.sqrt(math.fsum(c * c for c in centred) / (len(scorable) - 1))
        return [c / (std + epsilon) for c in centred]

    return _apply_formula(group.rewards, zscores)


def rloo(group: ScoredGroup) -> list[float]:
    """Return each reward minus the mean of all other rewards of the group. arXiv:2402.14740."""

    def leave_one_out(scorable: list[float]) -> list[float]:
        scale = len(scorable) / (len(scorable) - 1)
        return [scale * c for c in _subtract_mean(scorable)]

    return _apply_formula(group.rewards, leave_one_out)


def max_rl(group: ScoredGroup) -> list[float]:
    """Return (reward - mean) / mean, at most K - 1. arXiv:2602.02710.

    Raise ValueError if rewards differ and one is negative, because the mean could be <= 0.
    """

    def relative_to_mean(scorable: list[float]) -> list[float]:
        if min(scorable) < 0:
            raise ValueError(
                f"advantage=max_rl needs rewards >= 0, got {min(scorable)}: "
                "use advantage=group_mean, or add a constant to the rewards"
            )
        mean = math.fsum(scorable) / len(scorable)  # > 0, because rewards are >= 0 and some differ
        return [c / mean for c in _subtract_mean(scorable)]

    return _apply_formula(group.rewards, relative_to_mean)


def none(group: ScoredGroup) -> list[float]:
    """Return each reward unchanged. An unscorable rollout gets 0."""
    return [float(r) if _is_scorable(r) else 0.0 for r in group.rewards]


def turn_group_mean(
    group: ScoredGroup, *, discount: Annotated[float, Meta(ge=0, le=1)]
) -> list[list[float]]:
    """Return each turn's return minus the group's mean return at this turn.

    With one turn per rollout the numbers equal those of `group_mean`. A turn t has advantage 0 if
    fewer than two rollouts have a turn t, or if their returns are equal. An unscorable rollout gets
    []. Turn-level advantages: arXiv:2505.11821. Discounted returns: Sutton and Barto, chapter 13.
    """
    returns = [_returns(turns, discount) for turns in group.turn_rewards]
    longest = max(map(len, returns), default=0)
    columns = [
        _apply_formula([turns[t] if t < len(turns) else None for turns in returns], _subtract_mean)
        for t in range(longest)
    ]
    return [[column[i] for column in columns[: len(turns)]] for i, turns in enumerate(returns)]


def _returns(turns: Sequence[float] | None, discount: float) -> list[float]:
    backwards = accumulate(reversed(turns or []), lambda later, now: now + discount * later)
    return list(backwards)[::-1]


def _apply_formula(
    rewards: Sequence[float | None], formula: Callable[[list[float]], list[float]]
) -> list[float]:
    scorable = [r for r in rewards if _is_scorable(r)]
    if len(scorable) < 2 or max(scorable) - min(scorable) <= SPREAD_TOLERANCE:
        return [0.0] * len(rewards)
    advantages = iter(formula(scorable))
    return [next(advantages) if _is_scorable(r) else 0.0 for r in rewards]


def _subtract_mean(scorable: list[float]) -> list[float]:
    mean = math.fsum(scorable) / len(scorable)
    return [r - mean for r in scorable]


def _is_scorable(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)
