"""max_time: a run ends by itself, early enough for its checkpoint.

What is left must hold the present step, a checkpoint and the end of all parts. How long these take
is what the slowest of them took, with a quarter more.
"""

import time
from collections.abc import Sequence

from rl.config.durations import seconds_of
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.run.metrics import MetricsTail, Row, column
from rl.run.stop_request import StopRequest

_LAST = 20  # steps: the first may have compiled something
_MARGIN = 1.25
_ENDING_S = 5.0  # of all parts, and until each has noticed
_CHECKPOINT_S = 30.0  # while none was written
_NONE_WRITTEN_S = 0.01  # the phase of a step that wrote none takes less
_EVERY_S = 0.5  # between two looks


class TimeLimit:
    """Asks for the end of a run when its max_time is nearly over; None: never."""

    def __init__(self, max_time: float | str | None, run_folder: RunFolder) -> None:
        """The time begins now."""
        self.is_over, self._max_time = False, max_time
        self._began, self._looked = time.time(), float("-inf")
        self._seconds = float("inf") if max_time is None else seconds_of(max_time)
        self._tail = MetricsTail(run_folder)
        self._rows: list[Row] = []

    def look(self, stop: StopRequest) -> None:
        """Ask for the end if it is time.

        Raises:
            RunFailed: all of the time is over, and there is nothing new to be saved.

        """
        now = time.time()
        if self._max_time is None or self.is_over or now - self._looked < _EVERY_S:
            return
        self._looked = now
        self._rows += [row for row in self._tail.read() if row["time"] >= self._began]
        left = self._began + self._seconds - now
        if self._rows and left < room_to_save(self._rows):
            self.is_over = stop.asked = True
        elif not self._rows and left < 0:
            raise RunFailed(
                f"max_time={self._max_time} was over before the first step was: there is nothing "
                "to save. Raise it"
            )


def room_to_save(rows: Sequence[Row]) -> float:
    """Seconds that a step, a checkpoint and the end may take, by these lines of the metrics."""
    step = max(column(list(rows[-_LAST:]), "time/step"), default=0.0)
    checkpoint = max(column(list(rows), "time/checkpoint"), default=0.0)
    known = checkpoint if checkpoint > _NONE_WRITTEN_S else _CHECKPOINT_S
    return _MARGIN * (step + known) + _ENDING_S
