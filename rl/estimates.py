"""What a sample of rollouts says about a policy. G examples, n rollouts of one of them.

    standard error of the mean, clustered by example:
        sqrt(G / (G - 1) * sum_g (sum_i (r_gi - mean))^2) / N          N rollouts in all
    pass@k, unbiased (Chen et al., arXiv:2107.03374):
        mean over examples of 1 - C(n - c, k) / C(n, k)                 c of its n rollouts pass

Rollouts of one example resemble each other, so an error computed as if they were independent would
be too small. With groups of one size the clustered one is that of the mean of the group means.
"""

import math
from collections.abc import Sequence

Groups = Sequence[Sequence[float]]
"""Rewards of each example's rollouts; those that could not be scored are left out."""


def mean(groups: Groups) -> float:
    """Mean reward of all rollouts; NaN without any."""
    rewards = [reward for group in groups for reward in group]
    return sum(rewards) / len(rewards) if rewards else math.nan


def standard_error(groups: Groups) -> float:
    """Standard error of `mean`, clustered by example; NaN with fewer than two examples."""
    scored = [group for group in groups if group]
    if len(scored) < 2:
        return math.nan
    middle, count = mean(scored), sum(map(len, scored))
    squares = sum(sum(reward - middle for reward in group) ** 2 for group in scored)
    return math.sqrt(len(scored) / (len(scored) - 1) * squares) / count


def pass_at_k(groups: Groups, k: int, threshold: float) -> float:
    """Share of examples that one of k rollouts would pass, reward >= threshold; in 0..1.

    Examples with fewer than k scored rollouts are left out; NaN where none is left.
    """
    chances = [
        1 - math.comb(len(group) - passed, k) / math.comb(len(group), k)
        for group in groups
        if len(group) >= k
        for passed in [sum(reward >= threshold for reward in group)]
    ]
    return sum(chances) / len(chances) if chances else math.nan


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to the limit."""
    return [2**i for i in range(limit.bit_length())]


def zero_spread(groups: Groups, tolerance: float = 1e-6) -> float:
    """Share of examples whose rollouts all have the same reward; NaN where each has but one."""
    several = [group for group in groups if len(group) > 1]
    flat = sum(max(group) - min(group) <= tolerance for group in several)
    return flat / len(several) if several else math.nan
