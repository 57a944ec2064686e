"""Ray's head, as the supervisor sees it.

A minute after the head fell silent Ray ends every process that belongs to it, this one as well and
without a sentence of ours; and whatever asks the head waits until then. So it is looked at.
"""

import time
from collections.abc import Callable
from typing import Any

from rl.cluster.host import HeadLost
from rl.run.address import Address

_EVERY_S, _ANSWERS_S = 2.0, 2.0
_SILENT_S = 20.0  # a head that is started again may be back before
_LEFT_S = 25.0  # of the minute, for the ranks to save; the rest of it is for our own end


class RayHead:
    """Where the head listens, and since when it was seen not to answer."""

    def __init__(self, address: str, silent_s: float = _SILENT_S) -> None:
        self._address, self._silent_s = Address.parse(f"tcp://{address}"), silent_s
        self._looked = time.monotonic()
        self._silent_since: float | None = None
        self._lost: HeadLost | None = None

    def look(self) -> None:
        """Ask it now and then.

        Raises:
            HeadLost: it has been silent for too long; the message is for the user.

        """
        now = time.monotonic()
        if self._lost:
            raise self._lost
        if now - self._looked < min(_EVERY_S, self._silent_s):
            return
        self._looked = now
        try:
            self._address.connect(_ANSWERS_S).close()
        except OSError as error:
            # Since it was seen: nobody may have looked for minutes.
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
        """Do what asks the head, unless nobody would answer."""
        if not self._lost:
            ask(*arguments)
