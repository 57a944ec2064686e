"""Start as many groups as max_staleness allows, and return complete batches.

    publish(v) ---> admission: started < (v + 1 + max_staleness) * new_per_step + rejected
                       |  start group i with the next example; at most max_concurrent rollouts run
                       v
                    running ---> buffer ---> take_batch(step)   (rejected groups are replaced)

v: version of the weights in vLLM. new_per_step: number of groups that are sampled for a batch.
started, rejected: numbers of groups so far. The inequality above is the only off-policy rule. With
max_staleness 0 no group starts before vLLM has the weights that the group will train.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.episode import Example
from envs.stateful import Stateful
from rl.inference.live_version import LiveVersion
from rl.records import Credit, Group, Rollout
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.example_order import ExampleOrder, Place
from rl.rollouts.sampling_limits import FailureLimits
from rl.runtime.failure import RunFailed
from rl.runtime.status import STOPPED
from rl.wire import NoMoreBatches

GroupCredits = Callable[[Example, Sequence[Rollout], int], tuple[Credit, ...]]
"""(example, rollouts, policy version at the start) -> one credit per rollout"""
PlayGroupAt = Callable[[int, Example, int, int], Awaitable[tuple[Rollout, ...]]]
"""(group index, example, group size, policy version at the start) -> rollouts"""


@dataclass
class DispatcherState:
    """The state in a checkpoint: the groups to start next, and the states of other objects."""

    next_index: int = 0
    pending: list[int] = field(default_factory=list)  # started groups that no batch has used
    places: list[Place] = field(default_factory=list)  # (pool, position) of each pending example
    buffer: dict[str, Any] = field(default_factory=dict)  # result of FifoBuffer.state
    order: dict[str, Any] = field(default_factory=dict)  # result of ExampleOrder.state
    stateful: dict[str, Any] = field(default_factory=dict)  # states of Dispatcher.stateful


@dataclass
class Dispatcher:
    """Starts groups and collects batches; all methods run in one asyncio loop."""

    play_group: PlayGroupAt
    order: ExampleOrder
    credit: GroupCredits
    buffer: FifoBuffer
    group_size: int
    groups_per_step: int
    max_staleness: int
    max_concurrent: int
    state: DispatcherState
    step: int = 0
    version: LiveVersion = field(default_factory=LiveVersion)  # version in vLLM, set by `publish`
    on_rejected: Callable[[Group], None] = lambda _: None  # called with each rejected group
    stateful: Mapping[str, Stateful] = field(default_factory=dict)  # objects whose states are saved

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._interrupted = deque(self.state.pending)  # groups of the interrupted run come first
        self._next_index = self.state.next_index
        self._new_per_step = self.buffer.num_new(self.groups_per_step)
        # Do not count pending groups yet, because `run` starts and counts them again.
        self._started = self.step * self._new_per_step
        self._num_rejected = 0
        self._end: NoMoreBatches | None = None  # why no batch will follow
        self._stopped = False
        for name, each in self.stateful.items():
            if state := self.state.stateful.get(name):
                each.load(state)
        self.buffer.load(self.state.buffer)
        self.order.load(self.state.order)
        self._next_step = self.step
        self._running: dict[int, int] = {}  # group index -> policy version at its start
        pending = zip(self.state.pending, self.state.places, strict=True)
        self._untrained: dict[int, Place] = dict(pending)  # started groups that no batch has used
        self._taken: dict[int, Place] = {}  # the new, not replayed, groups of the newest batch
        self._limits = FailureLimits(self.group_size, self.groups_per_step)

    async def run(self) -> None:
        """Start each admitted group, until cancelled. Raise an ExceptionGroup if a group fails."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                async with self._changed:
                    await self._changed.wait_for(self._may_start_group)
                    index = self._interrupted.popleft() if self._interrupted else self._next_index
                    self._next_index = max(self._next_index, index + 1)
                    self._started += 1
                    # Mark the group as running now, so that `draw` counts it before its task runs.
                    self._running[index] = version = self.version.number
                    if index not in self._untrained:
                        self._untrained[index] = self.order.next(index)
                tasks.create_task(self._play(index, version))

    def _may_start_group(self) -> bool:
        version = self.version.number
        # No batch contains rejected groups, so each rejected group allows another group to start.
        limit = (version + 1 + self.max_staleness) * self._new_per_step + self._num_rejected
        fits = (len(self._running) + 1) * self.group_size <= self.max_concurrent
        # A group larger than max_concurrent runs alone, because otherwise it would never start.
        may_start = version >= 0 and self._end is None
        return may_start and self._started < limit and (fits or not self._running)

    async def _play(self, index: int, version: int) -> None:
        place = self._untrained[index]
        example = self.order.example(place)
        rollouts = await self.play_group(index, example, self.group_size, version)
        if self._stopped:  # the checkpoint lists the group, and a resumed run plays it again
            return
        group = Group(index, example, version, rollouts, self.credit(example, rollouts, version))
        async with self._changed:
            del self._running[index]
            self._limits.record_group(group)
            self.order.observe(place, group)
            accepted = self.buffer.add(group)
            end = self._limits.record_decision(accepted=accepted, counts=self.buffer.rejected)
            self._end = self._end or end
            if not accepted:
                self._num_rejected += 1
                del self._untrained[index]  # a resumed run does not play rejected groups again
                self.on_rejected(group)
            self._changed.notify_all()  # another group may start, or a batch may be complete

    async def publish(self, version: int) -> None:
        """Record that vLLM now samples with the weights of `version`, and admit more groups."""
        async with self._changed:
            self.version.publish(version)
            self._changed.notify_all()

    async def take_batch(self, step: int) -> list[Group]:
        """Wait for a step's groups and return them; raise NoMoreBatches if sampling has ended."""
        drawn: list[Group] | None = None

        def has_batch() -> bool:
            nonlocal drawn
            if not self._stopped:
                drawn = self.buffer.draw(
                    step, self.groups_per_step, self.max_staleness, self._running.values()
                )
            return drawn is not None or self._end is not None

        async with self._changed:
            await self._changed.wait_for(has_batch)
        if drawn is None:
            assert self._end is not None  # because `has_batch` returned True
            raise self._end
        # Replayed groups and demonstrations are not in `_untrained`.
        new = [group for group in drawn if group.index in self._untrained]
        fault = "a group twice" if len({group.index for group in new}) < len(new) else ""
        if stale := [group.index for group in new if step - group.version > self.max_staleness]:
            fault = f"the groups {stale}, which are older than max_staleness={self.max_staleness}"
        if fault:  # only a custom buffer can cause this
            self.buffer.undo_draw()
            raise RunFailed(f"{type(self.buffer).__name__}.draw returned {fault}: correct `draw`")
        self._taken = {group.index: self._untrained.pop(group.index) for group in new}
        self._next_step = step + 1
        return drawn

    def return_batch(self) -> None:
        """Let a resumed run play the newest batch's groups again, because no step trained them."""
        self._untrained |= self._taken
        self.buffer.undo_draw()

    async def stop(self) -> None:
        """Make `take_batch` raise NoMoreBatches from now on, even if a batch is complete."""
        async with self._changed:
            self._end, self._stopped = NoMoreBatches(STOPPED, stopped=True), True
            self._changed.notify_all()

    def progress(self) -> str:
        if self.version.number < 0:
            return "waiting for the first weights"
        num_ready = min(len(self.buffer), self._new_per_step) * self.group_size
        batch_size = self._new_per_step * self.group_size
        running = len(self._running) * self.group_size
        return f"batch {self._next_step}: {num_ready} of {batch_size} rollouts, {running} in flight"

    def checkpoint(self) -> DispatcherState:
        """Return the state from which a resumed run starts the pending groups and then new ones."""
        return DispatcherState(
            next_index=self._next_index,
            pending=sorted(self._untrained),
            places=[place for _, place in sorted(self._untrained.items())],
            buffer=self.buffer.state(),
            order=self.order.state(),
            stateful={name: each.state() for name, each in self.stateful.items()},
        )
