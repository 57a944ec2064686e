"""max_time: the run ends by itself, early enough to write its checkpoint.

The remaining time must suffice for the present step, a checkpoint and the end of all processes. The
estimate is the slowest of each so far, plus a quarter.
"""

import time
from collections.abc import Sequence

from rl.config.schema import seconds_of
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsTail, Row, column
from rl.runtime.stop_request import StopRequest

_LAST = 20  # steps that count; the first step may include compilation
_MARGIN = 1.25
_ENDING_S = 5.0  # until every process has noticed and ended
_CHECKPOINT_S = 30.0  # assumed before the first checkpoint
_NONE_WRITTEN_S = 0.01  # the checkpoint phase takes less in a step that writes none
_EVERY_S = 0.5  # between two looks


class TimeLimit:
    """Asks for the end of a run when its max_time is nearly over; None means no limit."""

    def __init__(self, max_time: float | str | None, run_folder: RunFolder) -> None:
        """Start the clock."""
        self.is_over, self._max_time = False, max_time
        self._began, self._looked = time.time(), float("-inf")
        self._seconds = float("inf") if max_time is None else seconds_of(max_time)
        self._tail = MetricsTail(run_folder)
        self._rows: list[Row] = []

    def look(self, stop: StopRequest) -> None:
        """Ask for the end if the time requires it; RunFailed if it is over without a step."""
        now = time.time()
        if self._max_time is None or self.is_over or now - self._looked < _EVERY_S:
            return
        self._looked = now
        self._rows += [row for row in self._tail.read() if row["time"] >= self._began]
        left = self._began + self._seconds - now
        if self._rows and left < seconds_to_save(self._rows):
            self.is_over = stop.asked = True
        elif not self._rows and left < 0:
            raise RunFailed(
                f"max_time={self._max_time} was over before the first step was: there is nothing "
                "to save. Raise it"
            )


def seconds_to_save(rows: Sequence[Row]) -> float:
    """Return the seconds that a step, a checkpoint and the end may take, judged by the metrics."""
    step = max(column(list(rows[-_LAST:]), "time/step"), default=0.0)
    checkpoint = max(column(list(rows), "time/checkpoint"), default=0.0)
    known = checkpoint if checkpoint > _NONE_WRITTEN_S else _CHECKPOINT_S
    return _MARGIN * (step + known) + _ENDING_S
