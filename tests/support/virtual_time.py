"""Run asyncio code with a simulated clock, so that minutes take milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


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
