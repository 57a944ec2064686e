"""Report the line of user code that blocks the event loop.

If an environment's `async def` blocks (time.sleep, requests, a long computation), all rollouts
stop, and no task of the loop can report why. So a thread schedules a callback in the loop. If
the callback does not run in time, the thread reports the line that the loop is executing. The run
continues when that line returns.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Self
from weakref import WeakKeyDictionary

from envs.user_code import ROOT, is_library

log = logging.getLogger(__name__)


class Watchdog:
    def __init__(
        self, show: Callable[[str], None], *, patience: float = 3.0, interval: float = 0.5
    ) -> None:
        """Check every `interval` s, and call `show(message)` if code blocks for `patience` s."""
        self._show, self._patience, self._interval = show, patience, interval
        self._blocked: WeakKeyDictionary[asyncio.Task[object], float] = WeakKeyDictionary()
        self._ended = threading.Event()
        self._responded = True

    def __enter__(self) -> Self:
        self._loop, self._ident = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def pop_blocked_seconds(self) -> float:
        """Return for how many seconds the current task blocked the loop. Reset them to 0."""
        task = asyncio.current_task()
        return self._blocked.pop(task, 0.0) if task is not None else 0.0

    def _watch(self) -> None:
        asked_at, reported_s = time.monotonic(), 0.0
        while not self._ended.wait(self._interval) and not self._loop.is_closed():
            now = time.monotonic()
            if self._responded:
                self._responded, asked_at, reported_s = False, now, 0.0
                self._loop.call_soon_threadsafe(setattr, self, "_responded", True)
            elif now - asked_at > max(self._patience, 2 * reported_s):  # reports after 3, 6, 12 s
                reported_s = now - asked_at
                self._report(reported_s)

    def _report(self, seconds: float) -> None:
        task, frame = asyncio.current_task(self._loop), sys._current_frames().get(self._ident)
        if task is None or frame is None or (line := _innermost_user_line(frame)) is None:
            return  # no user code runs: the machine or a library is slow
        self._blocked[task] = seconds  # how long this task has blocked the loop so far
        message = (
            f"all rollouts have been blocked for {seconds:.0f} s by {line}: "
            "write a plain `def` function, which runs in a thread, or await non-blocking code"
        )
        log.warning("%s", message)
        self._show(message)


def _innermost_user_line(frame: FrameType) -> str | None:
    for one, _ in walk_stack(frame):
        file = Path(one.f_code.co_filename)
        if not is_library(str(file)) and not file.is_relative_to(ROOT / "rl"):
            return f"{one.f_code.co_qualname} ({file.name}:{one.f_lineno})"
    return None
