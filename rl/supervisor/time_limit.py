"""Implement max_time: end a run early enough that the trainer can save a checkpoint.

The supervisor stops a run before the remaining time is too short for one step, one checkpoint and
the end of all processes. It estimates that these take as long as the slowest recent step plus the
slowest checkpoint, plus 25 %, plus 5 s.
"""

import time
from collections.abc import Sequence

from rl.config.schema import seconds_of
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsTail, Row, column
from rl.runtime.stop_request import StopRequest

# Estimate a step's time from the latest steps, because the first ones may include compilation.
_RECENT_STEPS = 20
_TIMES = ("time/step", "time/checkpoint")
_MARGIN = 1.25
_ENDING_S = 5.0  # assumed seconds from the last checkpoint to the end of all processes
_CHECKPOINT_S = 30.0  # assumed minimum time of a checkpoint until one has been measured
# A checkpoint has bfloat16 and float32 weights, a bfloat16 export, and Adam's two float32 moments.
_BYTES_PER_PARAMETER = 16
_BYTES_PER_S = 2e8  # assumed speed of the disk
_NO_CHECKPOINT_S = 0.01  # the metric time/checkpoint is smaller if a step saved no checkpoint
_CHECK_INTERVAL_S = 0.5  # seconds between two checks of the remaining time


class TimeLimit:
    def __init__(self, max_time: float | str | None, run_folder: RunFolder) -> None:
        """Start the timer. `max_time`: seconds, or a text such as 3h30m; None: no limit."""
        self.is_over, self._max_time = False, max_time
        self._checkpoint_s = _CHECKPOINT_S
        self._began, self._last_check = time.time(), float("-inf")
        self._seconds = float("inf") if max_time is None else seconds_of(max_time)
        self._tail = MetricsTail(run_folder)
        self._rows: list[Row] = []

    def expect_checkpoint(self, num_parameters: int) -> None:
        """Estimate the first checkpoint's duration from the number of trained parameters."""
        seconds = num_parameters * _BYTES_PER_PARAMETER / _BYTES_PER_S
        self._checkpoint_s = max(_CHECKPOINT_S, min(seconds, 0.25 * self._seconds))

    def request_stop_if_due(self, stop: StopRequest) -> None:
        """Request a stop before max_time is over. Raise RunFailed if no step ends in time."""
        now = time.time()
        if self._max_time is None or self.is_over or now - self._last_check < _CHECK_INTERVAL_S:
            return
        self._last_check = now
        new = [row for row in self._tail.read() if row["time"] >= self._began]
        self._rows += [{name: row.get(name) for name in _TIMES} for row in new]  # save memory
        left = self._began + self._seconds - now
        if self._rows and left < seconds_to_save(self._rows, self._checkpoint_s):
            self.is_over = stop.asked = True
        elif not self._rows and left < 0:
            raise RunFailed(
                f"max_time={self._max_time} was over before the first step was done, so this start "
                "saved nothing: raise max_time"
            )


def seconds_to_save(rows: Sequence[Row], assumed: float = _CHECKPOINT_S) -> float:
    """Return the seconds of step + checkpoint + end. `assumed`: the first checkpoint's estimate."""
    step = max(column(list(rows[-_RECENT_STEPS:]), "time/step"), default=0.0)
    checkpoint = max(column(list(rows), "time/checkpoint"), default=0.0)
    known = checkpoint if checkpoint > _NO_CHECKPOINT_S else assumed
    return _MARGIN * (step + known) + _ENDING_S
