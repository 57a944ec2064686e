"""A length penalty that grows with the group's pass rate. ALP, arXiv:2506.05256.

    penalty = length_penalty * length * max(number of right, 1) / number of scored rollouts

So the policy learns short answers to easy examples, and may write long answers to hard ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from losses.groups import ScoredGroup
from rl.rollouts.credit import RewardShaping


@dataclass(frozen=True, kw_only=True)
class ByPassRate(RewardShaping):
    """Reward shaping by pass rate. A rollout is right if its reward is at least `right`."""

    right: float

    def penalties(self, group: ScoredGroup) -> Sequence[float]:
        """Return the number that is subtracted from the reward of each rollout."""
        scored = [reward for reward in group.rewards if reward is not None]
        count = max(len(scored), 1)
        rate = max(sum(reward >= self.right for reward in scored), 1) / count
        return [rate * penalty for penalty in super().penalties(group)]
