"""Status files: the current activity of each process, as a small JSON file in <run>/status.

The supervisor writes the status of each vLLM. Ranks and the rollouts process write their own. The
screen reads all statuses. In a status, the text before the first ": " is the phase, and the text
after it is the progress. A phase keeps its start time when its progress changes:

    status.set("waiting for batch 12: 40 of 64 rollouts")
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rl.runtime.files import write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.given_files import load_json
from rl.runtime.text import printable

STOPPED = "stopped, as asked"  # the reason shown if a signal or the file `stop` ended a run
PROGRESS_INTERVAL_S = 0.2  # minimum seconds between two writes of a status within one phase


@dataclass(frozen=True)
class ProcessStatus:
    doing: str
    since: float  # unix seconds of the start of the current phase
    pid: int

    @property
    def phase(self) -> str:
        return self.doing.partition(": ")[0]

    @property
    def progress(self) -> str:
        return self.doing.partition(": ")[2]


class Status:
    """The status file of one process. A status text is written only if it has changed."""

    def __init__(self, run_folder: RunFolder, process: str) -> None:
        self._path = run_folder.statuses / f"{process}.json"
        self._current: ProcessStatus | None = None
        self._written_doing = ""
        self._written_at = float("-inf")  # monotonic seconds of the latest write

    def set(self, doing: str) -> None:
        current = self._current
        if current is None or current.phase != doing.partition(": ")[0]:
            self._current = ProcessStatus(doing, time.time(), os.getpid())
            self._write(self._current)
        elif doing != self._written_doing:
            self._current = ProcessStatus(doing, current.since, current.pid)
            if time.monotonic() - self._written_at >= PROGRESS_INTERVAL_S:
                self._write(self._current)

    def _write(self, status: ProcessStatus) -> None:
        # Ignore a full disk, because the process that writes rollouts or metrics reports it.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(asdict(status)))
        self._written_doing, self._written_at = status.doing, time.monotonic()


class Stopwatch:
    """Measures how long each phase of a step takes, and sets the current phase as the status."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self.times: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str, status: str) -> Iterator[None]:
        self._status.set(status)
        began = time.monotonic()
        yield
        self.times[f"time/{name}"] = time.monotonic() - began


def read_statuses(run_folder: RunFolder) -> dict[str, ProcessStatus]:
    statuses = {}
    for path in sorted(run_folder.statuses.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            content = load_json(run_folder.read(path))
            statuses[path.stem] = ProcessStatus(
                printable(str(content["doing"])), float(content["since"]), int(content["pid"])
            )
    return statuses


def training_is_done(run_folder: RunFolder) -> bool:
    """Return whether rank 0 has set the status "done", after the last step or an early end."""
    trainer = read_statuses(run_folder).get("trainer.rank0")
    return trainer is not None and trainer.phase == "done"
