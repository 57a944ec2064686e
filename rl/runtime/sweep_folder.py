"""Read and write the folder of a sweep: a description of the sweep, and one record per job.

    <folder>/sweep.json        question, command, and the cores and GPUs that jobs use
             jobs/00003.json   overrides, run folder and result of job 3, updated by its process
             logs/00003.log    output of job 3, if each job runs in a separate process

A job is identified by its overrides, not by its number. A repeated command therefore finds the
record of each job, even if the order of the jobs has changed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from rl.runtime.files import Inside, write_atomically
from rl.runtime.given_files import load_json, regular_file
from rl.runtime.text import START_KEYS, key_of

SWEEP_VARIABLE = "OFFBYONE_SWEEP"  # environment variable with the path of the sweep's folder
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
NOT_STARTED, DID_NOT_END = "not started", "did not end"


@dataclass
class JobRecord:
    overrides: list[str]
    state: str = WAITING
    run_name: str | None = None  # None before the first start of the job
    folder: str | None = None  # the run folder of the job
    error: str | None = NOT_STARTED  # why the job has no result; None after success
    result: float | None = None  # the number that an optimiser such as Optuna maximises
    max_steps: int | None = None
    started: float | None = None  # unix seconds of the job's latest start
    ended: float | None = None
    grown: int = 0  # index of the command that added the job; 0: the sweep's first command


@dataclass(frozen=True)
class SweepFolder:
    path: Path

    info = Inside("sweep.json")
    jobs = Inside("jobs")  # folder with one JSON record per job

    def __str__(self) -> str:
        return str(self.path)

    def log_of(self, number: int) -> Path:
        return self.path / "logs" / f"{number:05d}.log"

    def read_info(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            content = load_json(regular_file(self.info, self.path).read_bytes())
            return content if isinstance(content, dict) else {}
        return {}

    def write_info(self, info: Mapping[str, Any]) -> None:
        _write_json(self.info, info)

    def records(self) -> dict[int, JobRecord]:
        """Return the record of each job number, in ascending order. Skip broken files."""
        known = {field.name for field in fields(JobRecord)}
        records = {}
        for path in sorted(self.jobs.glob("[0-9]*.json")):
            with suppress(OSError, ValueError, TypeError, AttributeError):
                content = load_json(regular_file(path, self.path).read_bytes())
                kept = {key: value for key, value in content.items() if key in known}
                records[int(path.stem)] = JobRecord(**kept)
        return records

    def claim(self, overrides: Sequence[str], grown: int = 0) -> tuple[int, JobRecord]:
        """Return (number, record) of the job with these overrides. Create a missing record."""
        return self.claim_all([overrides], grown)[0]

    def claim_all(
        self, jobs: Sequence[Sequence[str]], grown: int = 0
    ) -> list[tuple[int, JobRecord]]:
        """Return (number, record) of each job. `jobs`: the overrides of each job.

        Create missing records. `grown`: 0 for the sweep's first command, 1 for the next one, ...
        """
        records = self.records()
        # If two processes have recorded the same job, the record with the lower number counts.
        numbers = {identity(job.overrides): number for number, job in reversed(records.items())}
        for overrides in jobs:
            if identity(overrides) not in numbers:
                record = JobRecord(list(overrides), grown=grown)
                number = self._create(record, max(records, default=-1) + 1)
                numbers[identity(overrides)], records[number] = number, record
        claimed = (numbers[identity(overrides)] for overrides in jobs)
        return [(number, records[number]) for number in claimed]

    def _create(self, record: JobRecord, first: int) -> int:
        """Write a new record under the first free number from `first` on; return the number."""
        aside = self.path / f".job-{os.getpid()}"
        _write_json(aside, asdict(record))
        for number in count(first):
            with suppress(FileExistsError):  # another process or a broken file uses this number
                os.link(aside, self._path_of(number))
                aside.unlink()
                return number
        raise AssertionError("unreachable, because count() has no end")

    def write(self, number: int, record: JobRecord) -> None:
        _write_json(self._path_of(number), asdict(record))

    def _path_of(self, number: int) -> Path:
        self.jobs.mkdir(parents=True, exist_ok=True)
        return self.jobs / f"{number:05d}.json"


def sweep_of_this_process() -> SweepFolder | None:
    """Return the folder of the sweep to which this process belongs; None outside a sweep."""
    folder = os.environ.get(SWEEP_VARIABLE)
    return SweepFolder(Path(folder)) if folder else None


def identity(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the sorted overrides without those of START_KEYS, which do not identify a job."""
    return tuple(sorted(item for item in overrides if key_of(item) not in START_KEYS))


def labels(jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return a label per job: its overrides, except the overrides that all jobs share."""
    common = set.intersection(*map(set, jobs)) if len(jobs) > 1 else set()
    return [" ".join(item for item in job if item not in common) or "(defaults)" for job in jobs]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")
