"""What every process of a run is doing right now: one small JSON file per process in <run>/status.

A process writes its own file, the supervisor's screen reads them all. What stands before the first
": " of a text names the phase; what follows is progress and does not restart the phase's clock:

    status.set("waiting for batch 12: 40 of 64 rollouts")
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rl.run.failure import printable
from rl.run.folder import RunFolder
from rl.run.whole_files import write_whole

STOPPED = "stopped, as asked"  # why a run ended early that somebody wanted to end
PROGRESS_INTERVAL_S = 0.2  # at most five writes a second while the phase stays the same


@dataclass(frozen=True)
class PartStatus:
    """One process as it last described itself."""

    doing: str
    since: float  # unix seconds at which its present phase began
    pid: int

    @property
    def phase(self) -> str:
        """The text without its progress."""
        return phase_of(self.doing)


class Status:
    """The file of one process. A repeat costs no write; progress is written at 5 Hz."""

    def __init__(self, run_folder: RunFolder, part: str) -> None:
        """`part` is the process: inference, rollouts, trainer.rank0, ..."""
        self._path = run_folder.statuses / f"{part}.json"
        self._current: PartStatus | None = None
        self._written_doing = ""
        self._written_at = float("-inf")  # monotonic seconds

    def set(self, doing: str) -> None:
        """Say what this process does from now on."""
        current = self._current
        if current is None or current.phase != phase_of(doing):
            self._current = PartStatus(doing, time.time(), os.getpid())
            self._write(self._current)
        elif doing != self._written_doing:
            self._current = PartStatus(doing, current.since, current.pid)
            if time.monotonic() - self._written_at >= PROGRESS_INTERVAL_S:
                self._write(self._current)

    @contextlib.contextmanager
    def doing(self, doing: str) -> Iterator[None]:
        """Say so for the length of a block, then return to what was said before and to its clock.

        When the block raises the text stays, because it says where.
        """
        before = self._current
        self.set(doing)
        yield
        if before is not None:
            self._current = before
            self._write(before)

    def _write(self, status: PartStatus) -> None:
        content = {"doing": status.doing, "since": status.since, "pid": status.pid}
        # A full disk must stop the run where data is written, not where it is described.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(content))
        self._written_doing, self._written_at = status.doing, time.monotonic()


def read_statuses(run_folder: RunFolder) -> dict[str, PartStatus]:
    """The status of every process that has written one, by part; unreadable files are left out."""
    statuses = {}
    for path in sorted(run_folder.statuses.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(path.read_text())
            statuses[path.stem] = PartStatus(
                printable(str(content["doing"])), float(content["since"]), int(content["pid"])
            )
    return statuses


def training_is_done(run_folder: RunFolder) -> bool:
    """Whether the first rank says that it has finished, or has saved what was learned."""
    trainer = read_statuses(run_folder).get("trainer.rank0")
    return trainer is not None and trainer.phase == "done"


def phase_of(doing: str) -> str:
    """The part of a status text before its progress."""
    return doing.partition(": ")[0]


def progress_of(doing: str) -> str:
    """The part of a status text after the name of its phase."""
    return doing.partition(": ")[2]
