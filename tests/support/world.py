"""Run asyncio code with a simulated clock, so that minutes take milliseconds.

`World` simulates an engine and a trainer with random durations around the dispatcher. It counts
groups itself and asserts every guarantee at each event.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import numpy as np

from envs.episode import Example
from envs.protocol import Pool
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.dispatcher import Dispatcher, DispatcherState
from rl.rollouts.example_order import ShuffledOrder
from tests.support.rollouts import begun, group_credit, rollout, row

T = TypeVar("T")
GROUP_SIZE, GROUPS_PER_STEP = 2, 3
EXAMPLES = [Example(id=i, env="scripted", messages=[]) for i in range(10)]


class _Jump(selectors.DefaultSelector):
    """Advance the clock to the next timer instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if timeout is None and not ready:
            raise AssertionError("deadlock: all tasks wait, and no timer is set")
        if not ready:
            self.now += timeout or 0.0
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Return what `main` returns; a deadlock is an AssertionError."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)


class World:
    """Groups take 0.01 to 100 s, training steps about 1 s; some groups have no score."""

    def __init__(
        self, seed, max_staleness, *, rejects=0.0, step=0, buffer=None, **options: Any
    ) -> None:
        self.seed, self.max_staleness, self.rejects = seed, max_staleness, rejects
        self.started, self.rejected, self.batches = {}, [], {}  # started: index -> version
        self.most_running, self.first_step = 0, step
        buffer, credit = FifoBuffer() if buffer is None else buffer, group_credit()
        self.num_new = buffer.num_new(GROUPS_PER_STEP)
        self.replayed_until = getattr(buffer, "max_staleness", 0)
        self.dispatcher = Dispatcher(
            self.play_group,
            begun(ShuffledOrder(), [Pool(1.0, EXAMPLES)], seed),
            lambda example, rollouts, version: credit(example, rollouts),
            buffer,
            **{"group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP, "step": step},
            max_staleness=max_staleness,
            on_rejected=lambda group: self.rejected.append(group.index),
            **({"state": DispatcherState(), "max_concurrent": 1000} | options),
        )

    async def play_group(self, index, example, group_size, version):
        random = Random(f"{self.seed}:{index}")
        began, begun = self.dispatcher.version.number, len(self.started)
        assert began >= self.first_step, "started before the first push"
        useful = self.first_step * self.num_new + begun - len(self.rejected)
        assert useful < (began + 1 + self.max_staleness) * self.num_new
        assert index not in self.started
        self.started[index] = began
        self.most_running = max(self.most_running, len(self.dispatcher._running))
        await asyncio.sleep(10 ** random.uniform(-2, 2))
        broken = random.random() < self.rejects
        versions = np.array([-1, began, self.dispatcher.version.number], np.int32)
        rewards = [None if broken else random.random() for _ in range(group_size)]
        played, fields = replace(row(-1, 0, 0), token_versions=versions), {"error": "x" * broken}
        return tuple(rollout(reward, played, fields=fields) for reward in rewards)

    async def train(self, first: int, last: int) -> None:
        """Run the trainer's loop over these steps, and check every batch."""
        random = Random(self.seed)
        await asyncio.sleep(random.random())
        await self.dispatcher.publish(first)
        for step in range(first, last):
            batch = self.batches[step] = await self.dispatcher.take_batch(step)
            assert self.num_new <= len(batch) <= GROUPS_PER_STEP
            assert sum(not group.suffix for group in batch) == self.num_new
            for group in batch:
                limit = self.replayed_until if group.suffix else self.max_staleness
                assert 0 <= step - group.version <= limit
                rows = [row for rollout in group.rollouts for row in rollout.rows]
                versions = np.concatenate([row.token_versions[row.completion_mask] for row in rows])
                assert (step - versions).min() >= 0
                assert (step - versions).max() <= limit
            await asyncio.sleep(random.expovariate(1.0))
            await self.dispatcher.publish(step + 1)

    async def _run(self, last: int) -> None:
        running = asyncio.ensure_future(self.dispatcher.run())
        training = asyncio.ensure_future(self.train(self.first_step, last))
        try:
            await asyncio.wait([running, training], return_when=asyncio.FIRST_COMPLETED)
            (running if running.done() else training).result()
        finally:
            running.cancel()
            training.cancel()

    def run(self, last: int) -> "World":
        run_virtually(self._run(last))
        return self

    @property
    def trained(self) -> list[int]:
        """Return the indices of the trained groups in order, without replays."""
        groups = [group for batch in self.batches.values() for group in batch]
        return [group.index for group in groups if not group.suffix]
