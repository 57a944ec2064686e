"""Train on the shortest rollouts of large groups, which shortens answers. GFPO, arXiv:2508.09726.

A = (R - mean R) / (std R + epsilon) among the `keep` shortest scored rollouts, 0 for the others
"""

from dataclasses import replace

from losses.advantages import group_zscore
from losses.groups import ScoredGroup
from rl.config.ranges import PositiveInt


def shortest(group: ScoredGroup, *, keep: PositiveInt, epsilon: float) -> list[float]:
    """Return z-scores among the `keep` shortest rollouts. Of equal lengths, the first are kept."""
    scored = [i for i, reward in enumerate(group.rewards) if reward is not None]
    kept = sorted(scored, key=lambda i: group.lengths[i])[:keep]
    rewards = [reward if i in kept else None for i, reward in enumerate(group.rewards)]
    return group_zscore(replace(group, rewards=rewards), epsilon=epsilon)
