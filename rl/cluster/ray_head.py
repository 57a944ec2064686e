"""Ray's head, as the supervisor sees it.

A minute after the head fell silent, Ray ends every process that belongs to it, the supervisor
included and without a message of ours. Any call to the head blocks until then. So the supervisor
checks the head by itself.
"""

import time
from collections.abc import Callable
from typing import Any

from rl.cluster.host import HeadLost
from rl.runtime.network import Address

_EVERY_S, _ANSWERS_S = 2.0, 2.0
_SILENT_S = 20.0  # a restarted head may be back before
_LEFT_S = 25.0  # of the minute, for the ranks to save; the supervisor needs the rest


class RayHead:
    """Where the head listens, and how long it has been silent."""

    def __init__(self, address: str, silent_s: float = _SILENT_S) -> None:
        self._address, self._silent_s = Address.parse(f"tcp://{address}"), silent_s
        self._looked = time.monotonic()
        self._silent_since: float | None = None
        self._lost: HeadLost | None = None

    def look(self) -> None:
        """Connect to the head every two seconds; HeadLost if it has been silent for too long."""
        now = time.monotonic()
        if self._lost:
            raise self._lost
        if now - self._looked < min(_EVERY_S, self._silent_s):
            return
        self._looked = now
        try:
            self._address.connect(_ANSWERS_S).close()
        except OSError as error:
            # Count from the first failed look, because the previous look may be minutes ago.
            self._silent_since = self._silent_since or now
            if now - self._silent_since < self._silent_s:
                return
            self._lost = HeadLost(
                f"Ray's head at {self._address} has not answered for {self._silent_s:g} s, and "
                "without it Ray ends all that runs on its nodes: start a cluster again",
                _LEFT_S,
            )
            raise self._lost from error
        self._silent_since = None

    def unless_lost(self, ask: Callable[..., object], *arguments: Any) -> None:
        """Call a function that asks the head, unless the head is lost."""
        if not self._lost:
            ask(*arguments)
