"""Finished groups wait here until a batch is drawn. `draw` guarantees the staleness limit.

A group that started under version v must be trained at step v + max_staleness at the latest. The
dispatcher never starts more groups than the batches up to their last step can hold. Two rules then
keep the guarantee without discarding a group and without favouring short rollouts: the oldest
groups are drawn first, and a batch waits for a running group if the later batches could not hold
all groups that it would leave behind. To wait only for the groups that are due now would not be
enough: with max_staleness 4, five batches of groups start under version 0, and the first five
batches must hold exactly those.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from rl.records import Group


class FifoBuffer:
    """Every finished group, oldest first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.rejected: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: plain values. A resumed run replays waiting groups."""
        return {"rejected": dict(self.rejected)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; start empty if the checkpoint holds nothing."""
        self.rejected = Counter(state.get("rejected", {}))

    def add(self, group: Group) -> bool:
        """Accept a finished group; return False if it is useless and must be replaced."""
        reason = self.why_useless(group)
        if reason:
            self.rejected[reason] += 1
        else:
            self._groups.append(group)
        return not reason

    def why_useless(self, group: Group) -> str:
        """Return why a group cannot be trained on, in one word for metrics; "" if it can."""
        if not group.rewards:
            return "unscorable"
        # A prompt that fills the context can be scored, but leaves no token to train on.
        return "" if any(rollout.rows for rollout in group.rollouts) else "without_tokens"

    def draw(
        self, step: int, count: int, max_staleness: int, running: Collection[int]
    ) -> list[Group] | None:
        """Return `count` groups for this step, or None while it must wait for a running group.

        Args:
            step: the step they train, which is the policy version that will train them.
            count: groups per batch.
            max_staleness: number of versions by which a token may be old.
            running: the versions under which the unfinished groups were started.

        """
        if len(self._groups) < count:
            return None
        # By start, because by finish short rollouts would be trained on first.
        self._groups.sort(key=lambda group: (group.version, group.index))
        drawn, kept = self._groups[:count], self._groups[count:]
        left = sorted([*running, *(group.version for group in kept)])
        # At best the i-th of them is trained i // count steps after the next. If that is too late
        # for one of them, this batch must hold a group that still runs, so it waits.
        if any(step + 1 + i // count > v + max_staleness for i, v in enumerate(left)):
            return None
        self._groups = kept
        assert all(step - group.version <= max_staleness for group in drawn)
        return drawn
