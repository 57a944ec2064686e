"""Starts groups as the policy advances and hands out complete batches.

    publish(v) ---> admission: started < (v + 1 + max_staleness) * groups_per_step + rejected
                       |  starts group i at the order's next place: max_concurrent rollouts at once
                       v
                    running ---> buffer ---> batch(step)   (rejected groups are replaced)

That inequality is the whole off-policy policy: with max_staleness 0 nothing is started before the
weights it will train are live. One condition variable wakes everybody whenever anything changed.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.episode import Example
from rl.inference.live_version import LiveVersion
from rl.records import Credit, Group, PlayGroup, Rollout
from rl.rollouts.buffer import UNTRAINABLE, FifoBuffer
from rl.rollouts.example_order import ExampleOrder, Place
from rl.run.failure import RunFailed
from rl.run.status import STOPPED
from rl.wire import NoMoreBatches

Crediting = Callable[[Example, Sequence[Rollout]], tuple[Credit, ...]]

_HOPELESS_GROUPS = 16  # without one scorable rollout: not bad luck, however small the batch is
_HOPELESS_BATCHES = 8  # of rejected groups in a row
_SOLVED = 0.9  # share of the way from the worst reward of the run to the best


def _ignore(group: Group) -> None:
    """Nobody wants to know of rejected groups."""


def _stored(owner: object, state: dict[str, Any]) -> dict[str, Any]:
    """The state as a checkpoint's JSON holds it, with numpy's numbers and arrays as Python's."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"a {type(value).__name__}")

    try:
        return json.loads(json.dumps(state, default=plain))
    except (TypeError, ValueError) as error:
        raise RolloutsFailed(
            f"{type(owner).__name__}.state() cannot be written to a checkpoint, which is JSON: "
            f"{error}. Return numbers, texts, lists and dicts with texts for keys"
        ) from error


class RolloutsFailed(RunFailed):
    """No usable rollouts come any more; the message says why."""


@dataclass
class DispatcherState:
    """What a checkpoint keeps: which groups come next, and what is known of rewards."""

    next_index: int = 0
    pending: list[int] = field(default_factory=list)  # started, not yet trained on
    places: list[Place] = field(default_factory=list)  # what each of these plays
    # Worst and best reward of the run, by environment.
    reward_ranges: dict[str, list[float]] = field(default_factory=dict)
    buffer: dict[str, Any] = field(default_factory=dict)  # its own state
    order: dict[str, Any] = field(default_factory=dict)  # likewise


@dataclass
class Dispatcher:
    """Runs inside one asyncio loop.

    Attributes:
        version: of the policy that is live, shared with the chat; `publish` moves it.

    """

    play_group: PlayGroup
    order: ExampleOrder
    credit: Crediting
    buffer: FifoBuffer
    group_size: int
    groups_per_step: int
    max_staleness: int
    max_concurrent: int
    state: DispatcherState
    step: int = 0
    version: LiveVersion = field(default_factory=LiveVersion)
    on_rejected: Callable[[Group], None] = _ignore

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._again = deque(self.state.pending)  # groups of the interrupted run come first
        self._next = self.state.next_index
        # As many as the batches so far hold: pending groups start, and count, once more.
        self._started = self.step * self.groups_per_step
        self._rejected = 0
        self._rejected_in_a_row: list[tuple[str, list[float]]] = []  # environment, rewards of each
        self._reward_ranges = dict(self.state.reward_ranges)
        self._over: NoMoreBatches | None = None
        self._stopped = False
        self.buffer.load(self.state.buffer)
        self._rejected_before = Counter(self.buffer.rejected)  # by reason, when that row began
        self.order.load(self.state.order)
        self._next_step = self.step
        self._running: dict[int, int] = {}  # group index -> version it was started under
        # Of groups that no batch has held yet. A checkpoint of before there were other orders than
        # `shuffled` has no places; that one gives them again.
        pending = self.state.pending
        places = self.state.places or [self.order.next(index) for index in pending]
        self._untrained: dict[int, Place] = dict(zip(pending, places, strict=True))
        window = max(self.groups_per_step, _HOPELESS_GROUPS) * self.group_size
        self._failures: deque[str] = deque(maxlen=window)

    async def run(self) -> None:
        """Start groups as they are admitted, for ever. Raises what a group raised."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._admits)
                    index = self._again.popleft() if self._again else self._next
                    self._next = max(self._next, index + 1)  # a pending one is older than that
                    self._started += 1
                    # Before the task exists: a draw in between must know what it has to wait for.
                    self._running[index] = version = self.version.number
                    if index not in self._untrained:
                        self._untrained[index] = self.order.next(index)
                tasks.create_task(self._one(index, version))

    def _admits(self) -> bool:
        version = self.version.number
        # A rejected group is in no batch: one more may start in its place.
        limit = (version + 1 + self.max_staleness) * self.groups_per_step + self._rejected
        room = (len(self._running) + 1) * self.group_size <= self.max_concurrent
        # A group larger than max_concurrent runs alone, for else it would never start.
        live = version >= 0 and self._over is None
        return live and self._started < limit and (room or not self._running)

    async def _one(self, index: int, version: int) -> None:
        place = self._untrained[index]
        example = self.order.example(place)
        rollouts = await self.play_group(index, example, self.group_size)
        group = Group(index, example, version, rollouts, self.credit(example, rollouts))
        async with self._changed:
            del self._running[index]
            self._note_failures(group)
            rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
            if rewards:
                known = [*self._reward_ranges.get(example.env, ()), *rewards]
                self._reward_ranges[example.env] = [min(known), max(known)]
            self.order.observe(place, group)
            if self.buffer.add(group):
                self._rejected_in_a_row.clear()
                self._rejected_before = Counter(self.buffer.rejected)
            else:
                self._note_rejection(example.env, rewards)
                del self._untrained[index]  # a resumed run does not play it again
                self.on_rejected(group)
            self._changed.notify_all()  # admission has room, the buffer perhaps a batch

    def _note_failures(self, group: Group) -> None:
        # A rollout that could be scored leaves an empty error: one in the window is hope enough.
        self._failures.extend(rollout.error for rollout in group.rollouts)
        if len(self._failures) == self._failures.maxlen and all(self._failures):
            (error, count), *_ = Counter(self._failures).most_common(1)
            raise RolloutsFailed(
                f"none of the last {len(self._failures)} rollouts could be scored. "
                f"{count} of them: {error}"
            )

    def _note_rejection(self, env: str, rewards: list[float]) -> None:
        self._rejected += 1
        self._rejected_in_a_row.append((env, rewards))
        count = len(self._rejected_in_a_row)
        # At least 64: a batch of one or two groups is rejected eight times by bad luck alone.
        if self._over is not None or count < _HOPELESS_BATCHES * max(self.groups_per_step, 8):
            return
        counts = ", ".join(f"{n} {why}" for why, n in self.buffer.rejected.items())
        rejected = f"the buffer rejected the last {count} groups (in all: {counts})"
        known = [(name, reward) for name, group in self._rejected_in_a_row for reward in group]
        if known and sum(self._share(*one) for one in known) / len(known) >= _SOLVED:
            mean = sum(reward for _, reward in known) / len(known)
            message = f"the task is solved: {rejected}, whose mean reward is {mean:.3f}"
            self._over = NoMoreBatches(message, solved=True)
            return
        why = "the task is too easy or too hard for this policy. Use buffer=fifo or other examples"
        reasons = set(Counter(self.buffer.rejected) - self._rejected_before)
        if reasons and reasons <= UNTRAINABLE:
            why = (
                "nothing in them could be trained on. A rollout without a token has a prompt that "
                "fills max_seq_len: raise it, or use other examples"
            )
        self._over = NoMoreBatches(f"{rejected}: {why}", solved=False)

    def _share(self, env: str, reward: float) -> float:
        """How far a reward is on the way from the worst of its environment to the best."""
        worst, best = self._reward_ranges[env]
        # Where no reward ever differed from another nobody knows whether it is a good one.
        return (reward - worst) / (best - worst) if best > worst else 0.0

    async def publish(self, version: int) -> None:
        """Weights `version` are live: more groups may start."""
        async with self._changed:
            self.version.publish(version)
            self._changed.notify_all()

    async def batch(self, step: int) -> list[Group]:
        """Wait for the groups of a step, and take them.

        Raises:
            NoMoreBatches: the buffer takes nothing any more, or somebody wants the run to end.

        """
        drawn: list[Group] | None = None

        def ready() -> bool:
            nonlocal drawn
            if not self._stopped:
                drawn = self.buffer.draw(
                    step, self.groups_per_step, self.max_staleness, self._running.values()
                )
            return drawn is not None or self._over is not None

        # Looked for and taken under one lock: nobody comes in between.
        async with self._changed:
            await self._changed.wait_for(ready)
        if drawn is None:
            assert self._over is not None  # unless stopped, a batch that is complete still goes out
            raise self._over
        for group in drawn:
            del self._untrained[group.index]
        self._next_step = step + 1
        return drawn

    async def stop(self) -> None:
        """Give no further batch, not even one that is ready: somebody wants the run to end."""
        async with self._changed:
            self._over, self._stopped = NoMoreBatches(STOPPED, solved=True), True
            self._changed.notify_all()

    def progress(self) -> str:
        """Return what is being waited for, for the screen."""
        if self.version.number < 0:
            return "waiting for the first weights"
        num_ready = min(len(self.buffer), self.groups_per_step) * self.group_size
        batch_size = self.groups_per_step * self.group_size
        flying = len(self._running) * self.group_size
        return f"batch {self._next_step}: {num_ready} of {batch_size} rollouts, {flying} in flight"

    def checkpoint(self) -> DispatcherState:
        """Return what a resumed run needs to go on with the next examples."""
        return DispatcherState(
            next_index=self._next,
            pending=sorted(self._untrained),
            places=[place for _, place in sorted(self._untrained.items())],
            reward_ranges=self._reward_ranges,
            buffer=_stored(self.buffer, self.buffer.state()),
            order=_stored(self.order, self.order.state()),
        )
