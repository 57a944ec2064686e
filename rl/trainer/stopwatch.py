"""Measures the phases of a training step, and shows the current one on the screen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl.runtime.status import Status


class Stopwatch:
    """Seconds per phase of one step."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self.times: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, status: str) -> Iterator[None]:
        """Measure the block as time/<name> and show `status` on the screen."""
        self._status.set(status)
        began = time.monotonic()
        yield
        self.times[f"time/{name}"] = time.monotonic() - began
