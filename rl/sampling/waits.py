"""Counts what rollouts in flight wait for; the screen shows it if none finished for a minute."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Wait = Literal["place", "rollout", "turn", "opening"]

_LONG_S = 60.0


class Waits:
    """The counts of one asyncio loop."""

    def __init__(self) -> None:
        self._counts: Counter[Wait] = Counter()
        self._last = 0.0  # when a rollout finished, or began after nothing had been in flight

    @contextmanager
    def counted(self, wait: Wait, number: int = 1) -> Iterator[None]:
        """Count the block as a wait for the environment's limit, its code, or the server."""
        if not self._counts.total():
            self._last = asyncio.get_running_loop().time()
        self._counts[wait] += number
        try:
            yield
        finally:
            self._counts[wait] -= number

    def finished(self) -> None:
        """Note that a rollout has finished."""
        self._last = asyncio.get_running_loop().time()

    def standstill(self) -> str:
        """Return what the rollouts wait for; "" if one has finished within the last minute."""
        seconds = asyncio.get_running_loop().time() - self._last
        if not self._counts.total() or seconds < _LONG_S:
            return ""
        waits = {
            "vLLM": self._counts["turn"] + self._counts["opening"],
            "the environment": self._counts["rollout"] - self._counts["turn"],
            "a place in it (max_concurrent)": self._counts["place"],
        }
        parts = ", ".join(f"{count} for {what}" for what, count in waits.items() if count > 0)
        return f"none finished for {seconds:.0f} s, waiting: {parts}"
