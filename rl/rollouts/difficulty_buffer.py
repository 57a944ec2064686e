"""Buffer that rejects groups whose rewards are nearly equal, or are too low or high on average."""

from typing import ClassVar

import numpy as np

from rl.config.ranges import NonNegativeFloat
from rl.records import Group
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.compared import compared_columns, spread


class DifficultyBuffer(FifoBuffer):
    ORDERED: ClassVar[tuple[str, ...]] = ("min_reward", "max_reward")  # the first must be lower

    def __init__(
        self,
        *,
        min_spread: NonNegativeFloat,
        min_reward_variance: NonNegativeFloat | None,
        min_reward: float | None,
        max_reward: float | None,
    ) -> None:
        super().__init__()
        self.min_spread, self.min_reward_variance = min_spread, min_reward_variance
        self.min_reward, self.max_reward = min_reward, max_reward

    def why_useless(self, group: Group) -> str:
        if reason := super().why_useless(group):
            return reason
        if not any(credit.trains for credit in group.credits):
            return "untrained"  # for example, truncation excludes every rollout
        mean = sum(group.rewards) / len(group.rewards)
        if self.min_reward is not None and mean < self.min_reward:
            return "too_hard"
        if self.max_reward is not None and mean > self.max_reward:
            return "too_easy"
        columns = compared_columns(group)
        # With a critic, for example, no rewards are compared, so accept groups with equal rewards.
        if columns is None:
            return ""
        if max(map(spread, columns)) < self.min_spread:
            return "zero_spread"
        limit, variances = self.min_reward_variance, [np.var(c) for c in columns if c]
        return "low_variance" if limit is not None and max(variances, default=0.0) < limit else ""
