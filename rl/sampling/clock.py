"""Clock for sampler.rollout_timeout. It does not count waits that the rollout does not cause.

The clock counts the time of the server and of the environment's code and tools. It pauses while a
rollout waits for a slot of the environment or a judge (max_concurrent), for a free thread, for
vLLM's queue (if inference.args.max_num_seqs is set) or for a restart of vLLM.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from envs.deadline import Deadline


class CompletionSlots:
    """A semaphore that limits the completions that the server computes at the same time."""

    def __init__(self, number: int | None = None) -> None:
        """`number`: maximum number of concurrent completions; None: no limit."""
        self._number = number
        self._free = asyncio.Semaphore(number or 0)
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        """Hold `count` slots during the block, or all slots if `count` exceeds their number."""
        held = 0
        try:
            if self._number is not None:
                # Only one caller acquires slots at a time. Otherwise two callers could each hold
                # half of the slots that they need and wait for each other.
                async with self._queue:
                    while held < min(count, self._number):
                        await self._free.acquire()
                        held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()


@dataclass
class Clock(Deadline):
    engine_time: float = 0.0  # total seconds of the rollout's requests to the server

    @asynccontextmanager
    async def hold_slots(self, slots: CompletionSlots, count: int = 1) -> AsyncIterator[None]:
        """Pause the clock until slots are free. Run the block and add its time to `engine_time`."""
        async with AsyncExitStack() as stack:
            with self.pause():
                await stack.enter_async_context(slots.hold(count))
            began = time.monotonic()
            try:
                yield
            finally:
                self.engine_time += time.monotonic() - began
