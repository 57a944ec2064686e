"""Strategies that read the rewards of a group's attempts. conf/strategy explains the options."""

from collections.abc import Sequence
from typing import ClassVar

from rl.config.ranges import PositiveInt
from rl.records import Rollout
from rl.sampling.strategy import PlayOne, StartedGroup, Strategy, play_attempts


class Extremes(Strategy):
    """Play `factor * size` attempts. Keep the best and the worst `size / 2`. arXiv:2504.13818."""

    reads_rewards: ClassVar[bool] = True

    def __init__(self, *, factor: PositiveInt) -> None:
        self.factor = factor

    def num_first(self, size: int) -> int:
        return self.factor * size

    async def play(self, group: StartedGroup, play_one: PlayOne, size: int) -> Sequence[Rollout]:
        rollouts = await play_attempts(group, play_one, range(self.factor * size))
        # Attempts without a reward come last. Keep them only if fewer than `size` have a reward.
        rollouts.sort(key=lambda r: float("inf") if r.reward is None else -r.reward)
        end = max(sum(rollout.reward is not None for rollout in rollouts), size)
        num_worst = size // 2
        return [*rollouts[: size - num_worst], *rollouts[end - num_worst : end]]


class AdaptiveSize(Strategy):
    """Play up to `max_rounds` rounds of `size` attempts, until rewards differ. arXiv:2510.04996."""

    reads_rewards: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = False

    def __init__(self, *, max_rounds: PositiveInt) -> None:
        self.max_rounds = max_rounds

    async def play(self, group: StartedGroup, play_one: PlayOne, size: int) -> Sequence[Rollout]:
        rollouts: list[Rollout] = []
        for first in range(0, self.max_rounds * size, size):
            rollouts += await play_attempts(group, play_one, range(first, first + size))
            if len({rollout.reward for rollout in rollouts} - {None}) > 1:
                break
        return rollouts


class HintWhenAllFail(Strategy):
    """If all attempts fail, replace `num_hinted` of them by hinted ones. arXiv:2510.19807."""

    reads_rewards: ClassVar[bool] = True
    needs_hints: ClassVar[bool] = True

    def __init__(self, *, num_hinted: PositiveInt, failed_reward: float) -> None:
        self.num_hinted, self.failed_reward = num_hinted, failed_reward

    async def play(self, group: StartedGroup, play_one: PlayOne, size: int) -> Sequence[Rollout]:
        rollouts = await play_attempts(group, play_one, range(size))
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        # Attempts without a reward do not count, because it is unknown whether they failed.
        if not rewards or max(rewards) > self.failed_reward:
            return rollouts
        seeds = range(size, size + min(self.num_hinted, size))
        hinted = await play_attempts(group, play_one, seeds, hint="")
        return [*rollouts[: size - len(seeds)], *hinted]
