"""The state of a sweep in words: at its start, before each job, and at its end."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from rl.runtime.folder import RunFolder
from rl.runtime.sweep_folder import DONE, FAILED, RUNNING, WAITING, JobRecord, SweepFolder, labels
from rl.runtime.text import relative_path
from rl.terminal.panel import duration

STATES = (DONE, RUNNING, WAITING, FAILED)


@dataclass(frozen=True)
class Jobs:
    """The jobs of a sweep's last start."""

    records: dict[int, JobRecord]
    started: float  # unix seconds at which the sweep was started last

    @cached_property
    def labels(self) -> dict[int, str]:
        """The overrides that distinguish each job."""
        names = labels([record.overrides for record in self.records.values()])
        return dict(zip(self.records, names, strict=True))

    @cached_property
    def counts(self) -> Counter[str]:
        """How many jobs are in each state."""
        return Counter(record.state for record in self.records.values())

    @property
    def num_to_come(self) -> int:
        """How many jobs this start will begin. A job that it cut short waits for the next start."""
        waiting = (record for record in self.records.values() if record.state == WAITING)
        return sum((record.ended or 0.0) < self.started for record in waiting)

    @property
    def seconds_per_job(self) -> float | None:
        """The mean time of the jobs that are done, None if there is none."""
        done = [record for record in self.records.values() if record.state == DONE]
        times = [
            record.ended - record.started for record in done if record.ended and record.started
        ]
        return fmean(times) if times else None


def read_jobs(sweep: SweepFolder) -> Jobs:
    """Return the jobs of the last start; all jobs if the sweeper did not know them beforehand."""
    records, info = sweep.records(), sweep.read_info()
    numbers = info.get("jobs")
    kept = {n: record for n, record in records.items() if not numbers or n in numbers}
    return Jobs(kept, info.get("started") or 0.0)


def what_will_be_done(sweep: SweepFolder, command: str) -> str:
    """Return the first lines of a sweep; `command` resumes it."""
    jobs, info = read_jobs(sweep), sweep.read_info()
    lines, parts = [info.get("question") or ""], [f"sweep {relative_path(sweep.path)}"]
    if jobs.records:
        waiting = [r for r in jobs.records.values() if r.state == WAITING and r.folder]
        begun = sum(RunFolder(Path(str(record.folder))).has_steps() for record in waiting)
        parts += [f"{len(jobs.records)} jobs"]
        parts += [f"{jobs.counts[DONE]} done before"] if jobs.counts[DONE] else []
        parts += [f"{begun} to be resumed"] if begun else []
    lines.append(", ".join(parts) + at_once(info["slots"]))
    lines.append(f"to resume it after an interruption:\n  {command}")
    return "\n".join(line for line in lines if line)


def at_once(slots: list[dict[str, list[str]]]) -> str:
    """Return how many jobs run at the same time, and the resources of each."""
    if not slots:
        return ""
    cores, gpus = len(slots[0]["cores"]), len(slots[0]["gpus"])
    each = [f"{cores} {'core' if cores == 1 else 'cores'}"]
    each += [f"{gpus} {'GPU' if gpus == 1 else 'GPUs'}"] if gpus else []
    return f"; {len(slots)} at once, each on {' and '.join(each)}"


def announce(sweep: SweepFolder, number: int) -> None:
    """Print which job starts, and how far the others are. For jobs that run one after another."""
    jobs = read_jobs(sweep)
    position = list(jobs.records).index(number) + 1
    parts = [f"job {position} of {len(jobs.records)}: {jobs.labels[number]}"]
    parts += [f"{jobs.counts[state]} {state}" for state in (DONE, FAILED) if jobs.counts[state]]
    if each := jobs.seconds_per_job:
        left = jobs.num_to_come + jobs.counts[RUNNING]
        parts.append(f"about {duration(each * left)} left")
    print("\n" + ", ".join(parts), flush=True)  # noqa: T201


def what_is_left(sweep: SweepFolder, command: str) -> str:
    """Return what `command` would still run; empty if every job is done."""
    jobs = read_jobs(sweep)
    left, failed = len(jobs.records) - jobs.counts[DONE], jobs.counts[FAILED]
    if not left:
        return ""
    why = f" ({failed} failed)" if failed else ""
    return f"{left} of {len(jobs.records)} jobs are not done{why}; to resume them:\n  {command}"
