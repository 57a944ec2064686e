"""Decides when sampling can stop because no further group would teach the policy anything.

no rollout of the last groups could be scored        RolloutsFailed
the buffer rejected many groups in a row             NoMoreBatches
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from rl.records import Group
from rl.runtime.failure import RunFailed
from rl.wire import NoMoreBatches

_HOPELESS_GROUPS = 16  # without one scorable rollout, which is more than bad luck
_HOPELESS_BATCHES = 8  # of rejected groups in a row


class RolloutsFailed(RunFailed):
    """No usable rollouts are produced; the message says why."""


@dataclass
class Prospects:
    """What is known of the newest groups."""

    group_size: int
    groups_per_step: int
    _num_rejected: int = 0  # groups in a row

    def __post_init__(self) -> None:
        window = max(self.groups_per_step, _HOPELESS_GROUPS) * self.group_size
        self._errors: deque[str] = deque(maxlen=window)

    def note(self, group: Group) -> None:
        """Take in a finished group.

        Raises:
            RolloutsFailed: none of the last rollouts could be scored.

        """
        # A scorable rollout has no error, so the run continues if the window has a single one.
        self._errors.extend(rollout.error for rollout in group.rollouts)
        if len(self._errors) == self._errors.maxlen and all(self._errors):
            (error, count), *_ = Counter(self._errors).most_common(1)
            raise RolloutsFailed(
                f"none of the last {len(self._errors)} rollouts could be scored. "
                f"{count} of them: {error}"
            )

    def offered(self, *, accepted: bool, counts: Mapping[str, int]) -> NoMoreBatches | None:
        """Take in whether the buffer accepted a group; return why sampling ends, if it does.

        `counts`: the groups rejected so far, by reason.
        """
        self._num_rejected = 0 if accepted else self._num_rejected + 1
        # At least 64, because eight batches of one or two groups may be rejected by bad luck.
        if self._num_rejected < _HOPELESS_BATCHES * max(self.groups_per_step, 8):
            return None
        in_all = ", ".join(f"{n} {why}" for why, n in counts.items())
        return NoMoreBatches(
            f"the buffer rejected the last {self._num_rejected} groups (in all: {in_all}): the "
            "task is too easy or too hard for this policy. Use buffer=fifo or other examples, or "
            "raise max_seq_len if most groups are without_tokens"
        )
