"""Finished groups wait here until a batch is drawn. The staleness guarantee lives in `draw`.

A group started under version v must be trained at step v + max_staleness at the latest. Admission
never starts more groups than the batches up to their last step can hold, so the promise is kept
without discarding anything, and without favouring short rollouts, by two rules: the oldest are
drawn first, and a batch waits for a running group if the later batches could not hold all that it
would leave behind. To wait only for the groups that are due by now would not do: with max_staleness
4, five batches of groups start under version 0, and the first five batches must be just those.
"""

from collections import Counter
from collections.abc import Collection

from rl.records import Group


class FifoBuffer:
    """Every finished group, oldest first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.rejected: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: Group) -> bool:
        """Take a finished group; False if it is useless and must be replaced by another."""
        if all(rollout.reward is None for rollout in group.rollouts):
            self.rejected["unscorable"] += 1
            return False
        self._groups.append(group)
        return True

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
        self._groups.sort(key=lambda group: (group.version, group.index))
        drawn, kept = self._groups[:count], self._groups[count:]
        left = sorted([*running, *(group.version for group in kept)])
        # At best the i-th of them is trained i // count steps after the next.
        if any(step + 1 + i // count > v + max_staleness for i, v in enumerate(left)):
            return None
        self._groups = kept
        assert all(step - group.version <= max_staleness for group in drawn)
        return drawn
