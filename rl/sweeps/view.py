"""What the screen of a sweep remembers: records and metrics of its jobs, read as they grow."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rl.report.panel import RunView, duration
from rl.report.screen import with_evaluation
from rl.run.folder import RunFolder
from rl.run.metrics import MetricsTail
from rl.run.status import read_statuses
from rl.run.sweep_folder import RUNNING, JobRecord, SweepFolder
from rl.sweeps.overview import (
    STATES,
    jobs_of_now,
    labels_of,
    num_to_come,
    seconds_of_a_job,
    states,
)


@dataclass
class JobView:
    """A job as the screen knows it."""

    label: str
    record: JobRecord
    run: RunView
    phase: str = ""  # of its start, until the first step is done

    def seconds_left(self, now: float) -> float | None:
        """Of a running job, as far as it is known."""
        return self.run.seconds_left(now) if self.record.state == RUNNING else None


class SweepView:
    """Reads records and metrics as they grow."""

    def __init__(self, sweep: SweepFolder) -> None:
        self.sweep, self.started = sweep, time.time()
        self.jobs: dict[int, JobView] = {}
        self._tails: dict[str, MetricsTail] = {}

    def read(self) -> None:
        """Take in what is new."""
        records = jobs_of_now(self.sweep)
        names = labels_of(records)
        for num, record in records.items():
            job = self.jobs.setdefault(num, JobView(names[num], record, RunView("", 0)))
            job.label, job.record = names[num], record
            job.run.max_steps = record.max_steps or 0
            if record.folder is not None:
                folder = RunFolder(Path(record.folder))
                tail = self._tails.setdefault(record.folder, MetricsTail(folder))
                for row in tail.read():
                    job.run.add(with_evaluation(job.run, row))
                starts = record.state == RUNNING and not job.run.rows
                job.phase = phase_of_start(folder) if starts else ""

    def num_in(self, state: str) -> int:
        """Jobs in a state."""
        return states([job.record for job in self.jobs.values()])[state]

    def num_to_come(self) -> int:
        """Jobs that this start of the sweep will begin."""
        return num_to_come([job.record for job in self.jobs.values()], self.started)

    def seconds_left(self, now: float) -> float | None:
        """What the sweep will still take; None as long as nobody can know."""
        running = [job for job in self.jobs.values() if job.record.state == RUNNING]
        known = [left for job in running if (left := job.seconds_left(now)) is not None]
        each = seconds_of_a_job([job.record for job in self.jobs.values()])
        if each is None and known:
            each = fmean(
                now - (job.record.started or now) + (job.seconds_left(now) or 0.0)
                for job in running
                if job.seconds_left(now) is not None
            )
        if each is None:
            return None
        unknown = len(running) - len(known) + self.num_to_come()
        return (sum(known) + unknown * each) / max(len(running), 1)

    def times(self, now: float) -> str:
        """How long the sweep has taken and will still take."""
        elapsed, left = duration(now - self.started), self.seconds_left(now)
        return f"{elapsed}, about {duration(left)} left" if left and left > 0 else elapsed

    def counts(self) -> str:
        """2 done, 2 running, 6 waiting."""
        parts = [f"{n} {state}" for state in STATES if (n := self.num_in(state))]
        return ", ".join(parts)


def phase_of_start(folder: RunFolder) -> str:
    """What a run does that has done no step yet."""
    if folder.warm_start.is_dir():
        return "warm start"
    statuses = read_statuses(folder)
    servers = [status for part, status in statuses.items() if part.startswith("inference")]
    starting = next((server for server in servers if server.phase != "serving"), None)
    slowest = starting or statuses.get("trainer.rank0")
    return slowest.phase.partition(" (")[0] if slowest else "starting"
