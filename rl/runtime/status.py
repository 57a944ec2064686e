"""What every process of a run is doing: one small JSON file per process in <run>/status.

A process writes its own file; the supervisor's screen reads all of them. The text before the first
": " names the phase. The text after it is progress, which does not restart the clock of the phase:

    status.set("waiting for batch 12: 40 of 64 rollouts")
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rl.runtime.files import write_whole
from rl.runtime.folder import RunFolder
from rl.runtime.text import strip_escapes

STOPPED = "stopped, as asked"  # why a run ended early, if a signal or the user asked for it
PROGRESS_INTERVAL_S = 0.2  # at most five writes per second while the phase stays the same


@dataclass(frozen=True)
class ProcessStatus:
    """The last status of one process."""

    doing: str
    since: float  # unix seconds at which the current phase began
    pid: int

    @property
    def phase(self) -> str:
        """The text without its progress."""
        return phase_of(self.doing)


class Status:
    """The status file of one process. A repeated text is not written again."""

    def __init__(self, run_folder: RunFolder, process: str) -> None:
        """`process` is inference, rollouts, trainer.rank0, ..."""
        self._path = run_folder.statuses / f"{process}.json"
        self._current: ProcessStatus | None = None
        self._written_doing = ""
        self._written_at = float("-inf")  # monotonic seconds

    def set(self, doing: str) -> None:
        """Describe what this process is doing from now on."""
        current = self._current
        if current is None or current.phase != phase_of(doing):
            self._current = ProcessStatus(doing, time.time(), os.getpid())
            self._write(self._current)
        elif doing != self._written_doing:
            self._current = ProcessStatus(doing, current.since, current.pid)
            if time.monotonic() - self._written_at >= PROGRESS_INTERVAL_S:
                self._write(self._current)

    @contextlib.contextmanager
    def doing(self, doing: str) -> Iterator[None]:
        """Set a status while the block runs, then restore the earlier one with its clock.

        If the block raises, its status remains, because it says where the error occurred.
        """
        before = self._current
        self.set(doing)
        yield
        if before is not None:
            self._current = before
            self._write(before)

    def _write(self, status: ProcessStatus) -> None:
        # Ignore a full disk here: the process that writes data will report it.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(asdict(status)))
        self._written_doing, self._written_at = status.doing, time.monotonic()


class Stopwatch:
    """Measure the phases of one step in seconds, and show the current one on the screen."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self.times: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str, status: str) -> Iterator[None]:
        """Measure the block as time/<name> and show `status` on the screen."""
        self._status.set(status)
        began = time.monotonic()
        yield
        self.times[f"time/{name}"] = time.monotonic() - began


def read_statuses(run_folder: RunFolder) -> dict[str, ProcessStatus]:
    """Return the status of each process that has a readable status file."""
    statuses = {}
    for path in sorted(run_folder.statuses.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            statuses[path.stem] = ProcessStatus(
                strip_escapes(str(content["doing"])), float(content["since"]), int(content["pid"])
            )
    return statuses


def training_is_done(run_folder: RunFolder) -> bool:
    """Return whether rank 0 has finished, or has saved a checkpoint and ended early."""
    trainer = read_statuses(run_folder).get("trainer.rank0")
    return trainer is not None and trainer.phase == "done"


def phase_of(doing: str) -> str:
    """Return the text of a status before its progress."""
    return doing.partition(": ")[0]


def progress_of(doing: str) -> str:
    """Return the text of a status after the name of its phase."""
    return doing.partition(": ")[2]
