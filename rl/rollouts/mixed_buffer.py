"""A buffer whose batches also contain replayed groups and demonstrations (conf/buffer/replay).

    batch of n groups = new groups + replay_share * n + demonstration_share * n

Only new groups count in the rule by which the dispatcher starts groups. A replayed group comes from
an earlier batch. Its logprobs, versions and advantages are unchanged, so the staleness metrics are
correct. A demonstration has no version. Its credit has no reward and the advantage 0.

The choice of replayed groups depends on the step and on earlier batches only. A checkpoint contains
the stored groups, so a resumed run replays the same groups.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Collection
from dataclasses import replace
from random import Random
from typing import Any

from envs.episode import Example
from rl.config.ranges import BelowOne, PositiveInt
from rl.records import Credit, Group, Rollout
from rl.rollouts.buffer import FifoBuffer, replayed
from rl.runtime.files import to_json
from rl.sampling.demonstrations import ImitationSampler
from rl.wire import pack, unpack


class MixedBuffer(FifoBuffer):
    # Set by the rollouts process if demonstration_share > 0: (seed, example) -> demonstrations.
    demonstrate: Callable[[str, Example], tuple[Rollout, ...]] | None = None

    def __init__(
        self,
        *,
        replay_share: BelowOne,
        demonstration_share: BelowOne,
        capacity: PositiveInt,
        max_staleness: PositiveInt,
        demonstrations: ImitationSampler,
    ) -> None:
        super().__init__()
        self.shares, self.demonstrations = (replay_share, demonstration_share), demonstrations
        self.capacity, self.max_staleness = capacity, max_staleness
        self._stored: list[Group] = []  # groups that may be replayed, the oldest first
        self._num_expired = 0

    def state(self) -> dict[str, Any]:
        stored = b64encode(pack(self._stored)).decode()
        return super().state() | {"stored": stored, "expired": self._num_expired}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        stored = state.get("stored")  # missing if another buffer wrote the checkpoint
        self._stored = unpack(b64decode(stored), list[Group]) if stored else []
        self._num_expired = state.get("expired", 0)

    def metrics(self) -> dict[str, float]:
        numbers = {"stored": float(len(self._stored)), "expired": float(self._num_expired)}
        return super().metrics() | numbers

    def num_new(self, count: int) -> int:
        return count - sum(self._num_others(count))

    def _num_others(self, count: int) -> list[int]:
        """Return how many groups of a batch are replayed, and how many are demonstrations."""
        numbers = [max(1, round(share * count)) if share else 0 for share in self.shares]
        if sum(numbers) >= count:
            raise ValueError(
                f"replay_share={self.shares[0]} and demonstration_share={self.shares[1]} leave no "
                f"new groups in a batch of {count} groups: lower them, or raise batch_size"
            )
        return numbers

    def draw(
        self, step: int, count: int, max_staleness: int, running: Collection[int]
    ) -> list[Group] | None:
        """Return new groups as FifoBuffer does, then replayed groups, then demonstrations.

        The batch has fewer than `count` groups while too few groups are stored.
        """
        num_replayed, num_demonstrated = self._num_others(count)
        new = super().draw(step, count - num_replayed - num_demonstrated, max_staleness, running)
        if new is None:
            return None
        young = [g for g in self._stored if step - g.version <= self.max_staleness]
        chosen = Random(step).sample(young, min(num_replayed, len(young)))
        # Store the new groups after the choice, so that no batch contains a group twice.
        stored = [*young, *(_storable_copy(group) for group in new if self.is_useful(group))]
        demonstrated = [
            self._demonstration_group(step * count + i, step, new[i % len(new)].example)
            for i in range(num_demonstrated if self.demonstrate else 0)
        ]
        self._before = self._stored, self._num_expired  # for `undo_draw`
        self._num_expired += len(self._stored) - len(young)
        self._stored = stored[-self.capacity :] if num_replayed else []
        return [*new, *(replayed(group, step) for group in chosen), *demonstrated]

    def undo_draw(self) -> None:
        self._stored, self._num_expired = self._before

    def is_useful(self, group: Group) -> bool:
        """Return whether a group can give a gradient. Other groups are not stored for replay."""
        # If a critic computes the advantages later, in the trainer, `compared` is (). Such a group
        # may give a gradient although its advantages are still 0.
        return any(c.trains and (c.compared == () or any(c.advantages)) for c in group.credits)

    def _demonstration_group(self, index: int, step: int, example: Example) -> Group:
        assert self.demonstrate is not None
        rollouts = self.demonstrate(f"demonstration {index}", example)
        # The reward is None, so that no baseline, critic or KL penalty uses the demonstrations.
        credits = (Credit(None, (0.0,), compared=()),) * len(rollouts)
        return Group(-1 - index, Example(-1, example.env, []), step, rollouts, credits)


def _storable_copy(group: Group) -> Group:
    rollouts = tuple(replace(r, messages=to_json(r.messages)) for r in group.rollouts)
    example = replace(group.example, messages=to_json(group.example.messages), info={})
    return replace(group, rollouts=rollouts, example=example)
