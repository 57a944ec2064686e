"""Buffer of finished groups. `draw` returns batches that respect the staleness limit.

A group that started under version v must be trained at step v + max_staleness at the latest. The
dispatcher never starts more groups than the batches up to that step can hold. Two rules then keep
the limit. First, the oldest groups are drawn first. Second, a batch waits for a running group if
the later batches could not hold all remaining groups in time. So no accepted group is discarded,
and short rollouts are not favoured. If a batch waited only for groups that are due at its own step,
a later step could have more due groups than its batch can hold.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from losses.groups import Source
from rl.records import Group


def replayed(group: Group, step: int) -> Group:
    """Return a copy of an earlier group for a replay at `step`, with new ids and Source.REPLAY."""
    rollouts = tuple(replace(rollout, source=Source.REPLAY) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts, suffix=f"@{step}")


class FifoBuffer:
    """A buffer that accepts each group with a reward and a row, and returns the oldest first."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self.rejected: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._groups)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without groups: a resumed run samples them again."""
        return {"rejected": dict(self.rejected)}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the counters that `state` returned; an empty dict sets them to 0."""
        self.rejected = Counter(state.get("rejected", {}))

    def metrics(self) -> dict[str, float]:
        """Return the metrics that each step logs as `buffer/<name>`."""
        return {f"rejected_{reason}": float(count) for reason, count in self.rejected.items()}

    def num_new(self, count: int) -> int:
        """Return how many of a batch's `count` groups are newly sampled. The default is all."""
        return count

    def add(self, group: Group) -> bool:
        """Add a group and return True, or return False if it is useless and must be replaced."""
        reason = self.why_useless(group)
        if reason:
            self.rejected[reason] += 1
        else:
            self._groups.append(group)
        return not reason

    def why_useless(self, group: Group) -> str:
        """Return the reason to reject the group, as one word for metrics, or an empty text."""
        if not group.rewards:
            return "unscorable" if group.rollouts else "without_rollouts"
        # A rollout whose prompt fills the context has a reward but no token to train on.
        return "" if any(rollout.rows for rollout in group.rollouts) else "without_tokens"

    def draw(
        self, step: int, count: int, max_staleness: int, running: Collection[int]
    ) -> list[Group] | None:
        """Return the groups of this step, or None if the step must wait for unfinished groups.

        Args:
            step: number of the step that trains on the groups. Step k updates policy version k.
            count: maximum number of groups. `num_new(count)` of them must be new.
            max_staleness: largest allowed difference between `step` and a token's version.
            running: the policy versions under which the unfinished groups were started.
        """
        if len(self._groups) < count:
            return None
        # Sort by starting time, because an order by end time would favour short rollouts.
        self._groups.sort(key=lambda group: (group.version, group.index))
        drawn, kept = self._groups[:count], self._groups[count:]
        remaining = sorted([*running, *(group.version for group in kept)])
        # The i-th remaining group is trained at step + 1 + i // count at the earliest. If that is
        # too late for any group, this batch must wait for a running group.
        if any(step + 1 + i // count > v + max_staleness for i, v in enumerate(remaining)):
            return None
        self._groups = kept
        return drawn

    def undo_draw(self) -> None:
        """Make `state()` ignore the newest `draw`, because no step trained the drawn groups."""
