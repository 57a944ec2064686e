"""A rollout's time: what counts towards sampler.rollout_timeout, and what is only waiting.

The environment's code, its tools and the server at work count. Waiting for one of the environment's
places (max_concurrent) or one of vLLM's (max_num_seqs) does not: a rollout that queues behind a
thousand others has done nothing that it could be too slow at.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field


class Seats:
    """As many completions as vLLM samples at once; the others wait here, where no clock runs."""

    def __init__(self, number: int | None = None) -> None:
        """`number`: None for any."""
        self._number = number
        self._free = asyncio.Semaphore(number or 0)
        self._queue = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Hold `count` seats, or all there are."""
        held = 0
        try:
            if self._number is not None:
                # One by one: two groups with half of what they need each would wait for ever.
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
    """How long a rollout may still be played, and how long the server has worked for it."""

    left: float  # seconds
    engine_time: float = 0.0  # seconds
    _timeout: asyncio.Timeout | None = field(default=None, init=False)
    _pauses: int = field(default=0, init=False)  # an environment may ask for two turns at once

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """TimeoutError where the block takes more than what is left."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.left) as self._timeout:
            try:
                yield
            finally:
                if (deadline := self._timeout.when()) is not None:
                    self.left = max(deadline - loop.time(), 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For as long as the block lasts, time does not count."""
        loop, timeout = asyncio.get_running_loop(), self._timeout
        assert timeout is not None, "it does not run"
        if not self._pauses and (deadline := timeout.when()) is not None:
            self.left = deadline - loop.time()
            timeout.reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                with suppress(RuntimeError):  # a turn that the environment no longer waits for
                    timeout.reschedule(loop.time() + self.left)

    @asynccontextmanager
    async def seated(self, seats: Seats, count: int = 1) -> AsyncIterator[None]:
        """Wait for seats, then let the server work and count that."""
        async with AsyncExitStack() as stack:
            with self.paused():
                await stack.enter_async_context(seats.taken(count))
            began = time.monotonic()
            try:
                yield
            finally:
                self.engine_time += time.monotonic() - began
