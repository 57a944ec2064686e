"""A time limit that can be paused, for example while its block waits for a free slot."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import ContextVar
from dataclasses import dataclass, field

# Holds `pause` of the running Deadline, a context manager. Waits in its block do not count.
WAITING: ContextVar[Callable[[], AbstractContextManager[None]]] = ContextVar(
    "WAITING", default=nullcontext
)


async def acquire(semaphore: asyncio.Semaphore) -> None:
    """Acquire a semaphore. The running deadlines do not count the wait."""
    with WAITING.get()():
        await semaphore.acquire()


@dataclass
class Deadline:
    left: float  # seconds until the deadline
    _timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None), init=False)
    # Number of open `pause` blocks. Several tasks of a rollout may pause the deadline together.
    _pauses: int = field(default=0, init=False)
    _outer: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, init=False)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Let the time run during the block. Raise TimeoutError when no time is left."""
        loop = asyncio.get_running_loop()
        self._outer = WAITING.get()
        async with asyncio.timeout(self.left) as self._timeout:
            token = WAITING.set(self.pause)
            try:
                yield
            finally:
                WAITING.reset(token)
                if (deadline := self._timeout.when()) is not None:
                    self.left = max(deadline - loop.time(), 0.0)

    @property
    def expired(self) -> bool:
        return self._timeout.expired()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the time during the block, also for the deadline that ran when `run` began."""
        loop = asyncio.get_running_loop()
        with self._outer():
            # reschedule() raises RuntimeError if the timeout has expired, or its block has ended.
            if not self._pauses and (deadline := self._timeout.when()) is not None:
                self.left = deadline - loop.time()
                with suppress(RuntimeError):
                    self._timeout.reschedule(None)
            self._pauses += 1
            try:
                yield
            finally:
                self._pauses -= 1
                if not self._pauses:
                    with suppress(RuntimeError):
                        self._timeout.reschedule(loop.time() + self.left)
