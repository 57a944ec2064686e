"""Measures a rollout's time towards sampler.rollout_timeout, without the time it only queues.

The time of the environment's code, its tools and the server counts. The time that a rollout waits
for the environment (max_concurrent) or for vLLM (max_num_seqs) does not count, because a rollout
that queues behind a thousand others is not slow.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field


class Seats:
    """The completions that vLLM samples at once; further ones wait here, with paused clocks."""

    def __init__(self, number: int | None = None) -> None:
        """`number`: completions at once; None: no limit."""
        self._number = number
        self._free = asyncio.Semaphore(number or 0)
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Hold `count` seats, or all if there are fewer."""
        held = 0
        try:
            if self._number is not None:
                # One group at a time: two groups with half of their seats each would deadlock.
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
    """The time that a rollout has left, and the time that the server has worked for it."""

    left: float  # seconds
    engine_time: float = 0.0  # seconds
    _timeout: asyncio.Timeout | None = field(default=None, init=False)
    _pauses: int = field(default=0, init=False)  # an environment may ask for two turns at once

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raise TimeoutError if the block takes longer than the time left."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.left) as self._timeout:
            try:
                yield
            finally:
                if (deadline := self._timeout.when()) is not None:
                    self.left = max(deadline - loop.time(), 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the block."""
        loop, timeout = asyncio.get_running_loop(), self._timeout
        assert timeout is not None, "the clock does not run"
        if not self._pauses and (deadline := timeout.when()) is not None:
            self.left = deadline - loop.time()
            timeout.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                with suppress(RuntimeError):  # the environment no longer waits for this turn
                    timeout.reschedule(loop.time() + self.left)

    @asynccontextmanager
    async def seated(self, seats: Seats, count: int = 1) -> AsyncIterator[None]:
        """Wait for seats, then count the block as the server's time."""
        async with AsyncExitStack() as stack:
            with self.paused():
                await stack.enter_async_context(seats.taken(count))
            began = time.monotonic()
            try:
                yield
            finally:
                self.engine_time += time.monotonic() - began
