"""Clock for sampler.rollout_timeout. The clock pauses while a rollout waits in a queue.

The clock counts the time of the environment's code, its tools and the server. The clock does not
count the time in which a rollout waits for the environment (max_concurrent), for vLLM
(max_num_seqs) or for a restart of vLLM, because a rollout that waits is not slow.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from rl.inference.router import WAITING


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
class Clock:
    left: float  # seconds until the rollout times out
    engine_time: float = 0.0  # total seconds of the rollout's requests to the server
    _timeout: asyncio.Timeout | None = field(default=None, init=False)
    # Number of open `pause` blocks. Several tasks of a rollout may pause the clock together.
    _pauses: int = field(default=0, init=False)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Run the clock during the block. Raise TimeoutError when no time is left."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.left) as self._timeout:
            token = WAITING.set(self.pause)
            try:
                yield
            finally:
                WAITING.reset(token)
                if (deadline := self._timeout.when()) is not None:
                    self.left = max(deadline - loop.time(), 0.0)

    @contextmanager
    def pause(self) -> Iterator[None]:
        loop, timeout = asyncio.get_running_loop(), self._timeout
        assert timeout is not None, "the clock is not running"
        if not self._pauses and (deadline := timeout.when()) is not None:
            self.left = deadline - loop.time()
            timeout.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                with suppress(RuntimeError):  # the timeout has expired, or its block has ended
                    timeout.reschedule(loop.time() + self.left)

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
