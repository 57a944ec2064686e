"""Decides when sampling can stop because no further group would teach the policy anything.

no rollout of the last groups could be scored        RolloutsFailed
the buffer rejected many groups in a row             NoMoreBatches: solved, or hopeless
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl.records import Group
from rl.rollouts.buffer import UNTRAINABLE
from rl.runtime.failure import RunFailed
from rl.wire import NoMoreBatches

_HOPELESS_GROUPS = 16  # without one scorable rollout, which is more than bad luck
_HOPELESS_BATCHES = 8  # of rejected groups in a row
_SOLVED = 0.9  # share of the distance from the worst reward of the run to the best


class RolloutsFailed(RunFailed):
    """No usable rollouts are produced; the message says why."""


@dataclass
class Prospects:
    """What is known of the groups so far.

    Attributes:
        reward_ranges: worst and best reward of the run, by environment.
        rejected_before: groups that the buffer had rejected, by reason, before the last ones.

    """

    group_size: int
    groups_per_step: int
    reward_ranges: dict[str, list[float]]
    rejected_before: Mapping[str, int]
    _num_rejected: int = 0  # groups in a row
    # Environment and reward of each of their rollouts:
    _rejected: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        window = max(self.groups_per_step, _HOPELESS_GROUPS) * self.group_size
        self._errors: deque[str] = deque(maxlen=window)

    def note(self, group: Group) -> None:
        """Take in a finished group.

        Raises:
            RolloutsFailed: none of the last rollouts could be scored.

        """
        # A scorable rollout has no error: a single one in the window is enough to go on.
        self._errors.extend(rollout.error for rollout in group.rollouts)
        if len(self._errors) == self._errors.maxlen and all(self._errors):
            (error, count), *_ = Counter(self._errors).most_common(1)
            raise RolloutsFailed(
                f"none of the last {len(self._errors)} rollouts could be scored. "
                f"{count} of them: {error}"
            )
        if group.rewards:
            env = group.example.env
            known = [*self.reward_ranges.get(env, ()), *group.rewards]
            self.reward_ranges[env] = [min(known), max(known)]

    def accepted(self, counts: Mapping[str, int]) -> None:
        """Take in that the buffer accepted a group; `counts`: groups rejected so far, by reason."""
        self._rejected.clear()
        self._num_rejected = 0
        self.rejected_before = dict(counts)

    def rejected(self, group: Group, counts: Mapping[str, int]) -> NoMoreBatches | None:
        """Take in that the buffer rejected a group; return why sampling ends, if it does."""
        self._num_rejected += 1
        self._rejected += [(group.example.env, reward) for reward in group.rewards]
        # At least 64, because eight batches of one or two groups may be rejected by bad luck.
        if self._num_rejected < _HOPELESS_BATCHES * max(self.groups_per_step, 8):
            return None
        in_all = ", ".join(f"{n} {why}" for why, n in counts.items())
        rejected = f"the buffer rejected the last {self._num_rejected} groups (in all: {in_all})"
        count = len(self._rejected)
        if count and sum(map(self._share, self._rejected)) / count >= _SOLVED:
            mean = sum(reward for _, reward in self._rejected) / count
            message = f"the task is solved: {rejected}, whose mean reward is {mean:.3f}"
            return NoMoreBatches(message, solved=True)
        why = "the task is too easy or too hard for this policy. Use buffer=fifo or other examples"
        reasons = set(Counter(counts) - Counter(self.rejected_before))
        if reasons and reasons <= UNTRAINABLE:
            why = (
                "nothing in them could be trained on. A rollout without a token has a prompt that "
                "fills max_seq_len: raise it, or use other examples"
            )
        return NoMoreBatches(f"{rejected}: {why}", solved=False)

    def _share(self, known: tuple[str, float]) -> float:
        """Return where a reward lies between the worst (0) and the best (1) of its environment."""
        env, reward = known
        worst, best = self.reward_ranges[env]
        # If all rewards are equal, it is not known whether they are good.
        return (reward - worst) / (best - worst) if best > worst else 0.0
