"""End sampling after many rollouts without a score, or many groups that the buffer rejected."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from rl.records import Group
from rl.runtime.failure import RunFailed
from rl.wire import NoMoreBatches

# Raise RunFailed after max(this number, groups per batch) groups in a row without a score:
_MAX_UNSCORABLE_GROUPS = 16
# End sampling if the buffer rejects the groups of this many batches in a row:
_MAX_REJECTED_BATCHES = 8


@dataclass
class FailureLimits:
    group_size: int
    groups_per_step: int
    _num_rejected: int = 0  # number of successive rejected groups up to now

    def __post_init__(self) -> None:
        window = max(self.groups_per_step, _MAX_UNSCORABLE_GROUPS) * self.group_size
        self._errors: deque[str] = deque(maxlen=window)

    def record_group(self, group: Group) -> None:
        """Record the errors of a group; raise RunFailed if no recent rollout has a score."""
        # A rollout with a score has the error "", so one such rollout is enough to continue. A role
        # that the environment does not train has neither an error nor a reward.
        self._errors.extend(r.error for r in group.rollouts if r.error or r.reward is not None)
        if len(self._errors) == self._errors.maxlen and all(self._errors):
            (error, count), *_ = Counter(self._errors).most_common(1)
            raise RunFailed(
                f"none of the last {len(self._errors)} rollouts could be scored. "
                f"Correct the most frequent error ({count} rollouts): {error}"
            )

    def record_decision(self, *, accepted: bool, counts: Mapping[str, int]) -> NoMoreBatches | None:
        """Record whether the buffer accepted a group; return NoMoreBatches if sampling must end."""
        self._num_rejected = 0 if accepted else self._num_rejected + 1
        # Assume at least 8 groups per batch, because a short series of rejections may be chance.
        if self._num_rejected < _MAX_REJECTED_BATCHES * max(self.groups_per_step, 8):
            return None
        totals = ", ".join(f"{n} {why}" for why, n in counts.items())
        return NoMoreBatches(
            f"the buffer rejected the last {self._num_rejected} groups (whole run: {totals}): the "
            "task may be too easy or hard for this policy. Use other examples or buffer=fifo. If "
            "most groups are without_tokens, raise max_seq_len. If most are without_rollouts, use "
            "another strategy"
        )
