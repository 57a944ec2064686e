"""Finished groups wait here until a batch is drawn. The staleness guarantee lives in `draw`.

A group started under version v must be trained at step v + max_staleness at the latest. The
sampler never starts more groups under versions up to v than the batches up to that step can hold,
so drawing the oldest first and waiting for the groups that are due keeps the promise without
discarding anything, and without favouring short rollouts.
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
        """Return `count` groups for this step, or None while one that is due has not finished.

        Args:
            step: the step they train, which is the policy version that will train them.
            count: groups per batch.
            max_staleness: versions that a token may lie behind.
            running: the versions under which the unfinished groups were started.

        """
        if len(self._groups) < count or any(v <= step - max_staleness for v in running):
            return None
        self._groups.sort(key=lambda group: (group.version, group.index))
        drawn, self._groups = self._groups[:count], self._groups[count:]
        assert all(step - group.version <= max_staleness for group in drawn)
        return drawn
