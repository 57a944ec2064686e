"""Buffer that rejects groups with nearly equal rewards, or a too low or too high mean reward."""

from collections.abc import Sequence
from typing import ClassVar

from rl.config.ranges import NonNegativeFloat
from rl.records import Group
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.compared import compared_columns


class DifficultyBuffer(FifoBuffer):
    ORDERED: ClassVar[tuple[str, ...]] = ("min_reward", "max_reward")  # values must ascend

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
            return "untrained"  # truncation excludes every rollout from training
        mean = sum(group.rewards) / len(group.rewards)
        if self.min_reward is not None and mean < self.min_reward:
            return "too_hard"
        if self.max_reward is not None and mean > self.max_reward:
            return "too_easy"
        columns = compared_columns(group)
        # With a critic, for example, nothing is compared, so equal rewards still give a gradient.
        if columns is None:
            return ""
        if max(map(_spread, columns)) < self.min_spread:
            return "zero_spread"
        least = self.min_reward_variance
        return "low_variance" if least is not None and max(map(_variance, columns)) < least else ""


def _spread(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers) if numbers else 0.0


def _variance(numbers: Sequence[float]) -> float:
    mean = sum(numbers) / max(len(numbers), 1)
    return sum((number - mean) ** 2 for number in numbers) / max(len(numbers), 1)
