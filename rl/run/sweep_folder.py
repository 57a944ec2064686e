"""The folder of a sweep: what was asked, and a record of each job, written by whoever runs it.

    <folder>/sweep.json        the question, the command, and where its jobs find what they need
             jobs/00003.json   a job: its overrides, the folder of its run, how it ended
             logs/00003.log    what it printed, where jobs run in processes of their own

A job is known by its overrides: the same command finds what it has left, whatever its number is.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from rl.run.typed import key_of
from rl.run.whole_files import write_whole

SWEEP_VARIABLE = "OFFBYONE_SWEEP"  # environment: the sweep's folder, for jobs in other processes
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
NOT_STARTED, DID_NOT_END = "not started", "did not end"
_ONLY_WHERE = {"run_name", "resume"}  # where a job's run lies, not what it is


@dataclass
class JobRecord:
    """One job of a sweep."""

    overrides: list[str]
    state: str = WAITING
    run_name: str | None = None  # from its first start on
    folder: str | None = None  # of its run
    error: str | None = NOT_STARTED  # why there is no result; None where it is done
    result: float | None = None  # what a sweeper maximises
    max_steps: int | None = None
    started: float | None = None  # unix seconds of its last start
    ended: float | None = None


@dataclass(frozen=True)
class SweepFolder:
    """Paths below the folder of a sweep."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def info(self) -> Path:
        """What was asked."""
        return self.path / "sweep.json"

    @property
    def jobs(self) -> Path:
        """One record a job."""
        return self.path / "jobs"

    def log_of(self, number: int) -> Path:
        """What a job printed."""
        return self.path / "logs" / f"{number:05d}.log"

    def read_info(self) -> dict[str, Any]:
        """What sweep.json says, nothing where there is none."""
        with suppress(OSError, ValueError):
            content = json.loads(self.info.read_text())
            return content if isinstance(content, dict) else {}
        return {}

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Write sweep.json."""
        _write(self.info, info)

    def records(self) -> dict[int, JobRecord]:
        """Every job's record by number, lowest first; one that cannot be read is left out."""
        known = {field.name for field in fields(JobRecord)}
        records = {}
        for path in sorted(self.jobs.glob("[0-9]*.json")):
            with suppress(OSError, ValueError, TypeError, AttributeError):
                content = json.loads(path.read_text())
                kept = {key: value for key, value in content.items() if key in known}
                records[int(path.stem)] = JobRecord(**kept)
        return records

    def claim(self, overrides: Sequence[str]) -> tuple[int, JobRecord]:
        """The number and record of the job with these overrides; new ones where nobody has them."""
        records = self.records()
        for number, record in records.items():
            if identity(record.overrides) == identity(overrides):
                return number, record
        record = JobRecord(list(overrides))
        aside = self.path / f".job-{os.getpid()}"
        _write(aside, asdict(record))
        for number in count(max(records, default=-1) + 1):
            with suppress(FileExistsError):  # another process was faster
                os.link(aside, self._path_of(number))
                aside.unlink()
                return number, record
        raise AssertionError("numbers do not end")

    def write(self, number: int, record: JobRecord) -> None:
        """Write a job's record."""
        _write(self._path_of(number), asdict(record))

    def _path_of(self, number: int) -> Path:
        self.jobs.mkdir(parents=True, exist_ok=True)
        return self.jobs / f"{number:05d}.json"


def sweep_of_this_process() -> SweepFolder | None:
    """The sweep that this process belongs to."""
    folder = os.environ.get(SWEEP_VARIABLE)
    return SweepFolder(Path(folder)) if folder else None


def identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """What tells a job from the others of its sweep."""
    return tuple(sorted(item for item in overrides if key_of(item) not in _ONLY_WHERE))


def labels(jobs: Sequence[Sequence[str]]) -> list[str]:
    """What each job has that not all of them have."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(item for item in job if item not in common) or "as composed" for job in jobs]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")
