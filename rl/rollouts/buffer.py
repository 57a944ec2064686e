"""Finished groups wait here until a batch is drawn. The staleness guarantee lives in `draw`.

A group started under version v must be trained at step v + max_staleness at the latest. Admission
never starts more groups than the batches up to their last step can hold, so the promise is kept
without discarding anything, and without favouring short rollouts, by two rules: the oldest are
drawn first, and a batch waits for a running group if the later batches could not hold all that it
would leave behind. To wait only for the groups that are due by now would not do: with max_staleness
4, five batches of groups start under version 0, and the first five batches must be just those.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from rl.records import Group

UNTRAINABLE = {"unscorable", "without_tokens"}  # reasons that every buffer has


class FifoBuffer:
    """Every finished group, oldest first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.rejected: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: plain values. Groups that wait are played again."""
        return {"rejected": dict(self.rejected)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; from nothing where the checkpoint holds nothing."""
        self.rejected = Counter(state.get("rejected", {}))

    def add(self, group: Group) -> bool:
        """Take a finished group; False if it is useless and must be replaced by another."""
        reason = self.why_useless(group)
        if reason:
            self.rejected[reason] += 1
        else:
            self._groups.append(group)
        return not reason

    def why_useless(self, group: Group) -> str:
        """Return why a group is not trained on, in a word for metrics; empty if it is."""
        return _useless(group)

    def draw(
        self, step: int, count: int, max_staleness: int, running: Collection[int]
    ) -> list[Group] | None:
        """Return `count` groups for this step, or None while one that must be in it still runs.

        Args:
            step: the step they train, which is the policy version that will train them.
            count: groups per batch.
            max_staleness: versions that a token may lie behind.
            running: the versions under which the unfinished groups were started.

        """
        if len(self._groups) < count:
            return None
        # By start: in the order of finishing, short rollouts would be trained on first.
        self._groups.sort(key=lambda group: (group.version, group.index))
        drawn, kept = self._groups[:count], self._groups[count:]
        left = sorted([*running, *(group.version for group in kept)])
        # At best the i-th of them is trained i // count steps after the next. Where that is too
        # late for one, this batch must hold a group that still runs: wait for it.
        if any(step + 1 + i // count > v + max_staleness for i, v in enumerate(left)):
            return None
        self._groups = kept
        assert all(step - group.version <= max_staleness for group in drawn)
        return drawn


class DifficultyBuffer(FifoBuffer):
    """Rejects groups that teach little (conf/buffer/difficulty).

    Attributes:
        min_spread: smallest difference of the best and the worst reward, shaped as it is trained;
            of the best and the worst advantage of one of the turns, where each has its own.
        min_reward_variance: smallest mean square of what such a reward differs from their mean.
        min_reward: a group whose mean lies below is too hard, by the environment's own rewards.
        max_reward: a group whose mean lies above is too easy, likewise.

    """

    judges_rewards: ClassVar[bool] = True
    ORDERED: ClassVar[tuple[str, str]] = ("min_reward", "max_reward")

    def __init__(
        self,
        *,
        min_spread: float,
        min_reward_variance: float | None,
        min_reward: float | None,
        max_reward: float | None,
    ) -> None:
        super().__init__()
        self.min_spread, self.min_reward_variance = min_spread, min_reward_variance
        self.min_reward, self.max_reward = min_reward, max_reward

    def why_useless(self, group: Group) -> str:
        """Return the first of the reasons that applies."""
        if reason := _useless(group):
            return reason
        if not any(credit.trains for credit in group.credits):
            return "untrained"  # all were cut off, and truncation masks that
        rewards = _rewards(group)
        mean = sum(rewards) / len(rewards)
        if self.min_reward is not None and mean < self.min_reward:
            return "too_hard"
        if self.max_reward is not None and mean > self.max_reward:
            return "too_easy"
        # A gradient comes of what advantages are made from: after truncation, penalties and all.
        shaped = [credit.reward for credit in group.credits if credit.reward is not None]
        if max(map(_spread, _compared(group, shaped))) < self.min_spread:
            return "zero_spread"
        least = self.min_reward_variance
        return "low_variance" if least is not None and _variance(shaped) < least else ""


def _useless(group: Group) -> str:
    if not _rewards(group):
        return "unscorable"
    # Scored, but its prompt left no room: it would fill a batch with nothing to train on.
    return "" if any(rollout.sequences for rollout in group.rollouts) else "without_tokens"


def _compared(group: Group, shaped: Sequence[float]) -> list[Sequence[float]]:
    """The numbers by which the group's rollouts are told apart: rewards, or those of each turn."""
    by_turn = [credit.advantages for credit in group.credits if credit.reward is not None]
    longest = max(map(len, by_turn), default=0)
    if longest < 2:
        return [shaped]
    # What turns earned may differ where rewards do not, and then it teaches.
    return [[numbers[t] for numbers in by_turn if t < len(numbers)] for t in range(longest)]


def _spread(numbers: Sequence[float]) -> float:
    return max(numbers) - min(numbers) if numbers else 0.0


def _variance(rewards: Sequence[float]) -> float:
    """Divided by their number: p * (1 - p) where a share p is right; 0 for none."""
    mean = sum(rewards) / max(len(rewards), 1)
    return sum((reward - mean) ** 2 for reward in rewards) / max(len(rewards), 1)


def _rewards(group: Group) -> list[float]:
    return [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
