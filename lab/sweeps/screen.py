"""The screen of jobs that run at the same time: one table for all of them.

The jobs write to their own logs, so a thread of the sweep's process has the terminal to itself. It
reads the records and the metrics of the jobs.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lab.sweeps.overview import STATES, Jobs, read_jobs
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsTail
from rl.runtime.status import read_statuses
from rl.runtime.sweep_folder import DONE, FAILED, RUNNING, WAITING, JobRecord, SweepFolder
from rl.runtime.text import relative_path
from rl.terminal.display import Display
from rl.terminal.panel import RunView, duration, heading, number, times

_TICK_S = 0.5
_LINE_EVERY_S = 60.0  # in a log file
_FRAME = 6  # lines around the jobs
_STYLES = {DONE: "green", RUNNING: "", WAITING: "dim", FAILED: "red"}
_SHOWN_FIRST = (FAILED, RUNNING, DONE, WAITING)  # if the screen is too small for all jobs

NAMES = ("steps", "reward", "eval", "")  # of the columns of a job


@dataclass
class JobView:
    """What the screen knows of one job."""

    label: str
    record: JobRecord
    run: RunView
    phase: str = ""  # of its start, until the first step is done

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining seconds of a running job; None if they are unknown."""
        return self.run.seconds_left(now) if self.record.state == RUNNING else None

    @property
    def was_interrupted(self) -> bool:
        """Whether the job was started, and neither runs nor is done."""
        return self.record.state in (FAILED, WAITING) and self.record.started is not None


class SweepScreen(Display):
    """Shows the jobs of a sweep while its block runs."""

    def __init__(self, sweep: SweepFolder, console: Console | None = None) -> None:
        super().__init__(console)
        self._sweep, self.started = sweep, time.time()
        self.jobs: dict[int, JobView] = {}
        self._records = Jobs({}, self.started)
        self._tails: dict[str, MetricsTail] = {}
        self._states: dict[int, str] = {}  # as printed in a log file
        self.printed_at = self.started
        self._end, self._thread = Event(), Thread(target=self._keep_updating, daemon=True)

    def __enter__(self) -> Self:
        super().__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        super().__exit__(*exception)

    def _keep_updating(self) -> None:
        while not self._end.wait(_TICK_S):
            self.update()

    def read(self) -> None:
        """Read records and metrics."""
        self._records = Jobs(read_jobs(self._sweep).records, self.started)
        for num, record in self._records.records.items():
            label = self._records.labels[num]
            job = self.jobs.setdefault(num, JobView(label, record, RunView("", 0)))
            job.label, job.record = label, record
            job.run.max_steps = record.max_steps or 0
            if record.folder is not None:
                folder = RunFolder(Path(record.folder))
                tail = self._tails.setdefault(record.folder, MetricsTail(folder))
                for row in tail.read():
                    job.run.add(row)
                starts = record.state == RUNNING and not job.run.rows
                job.phase = phase_of_start(folder) if starts else ""

    def picture(self, now: float) -> RenderableType:
        """Return the table of jobs under the progress of the sweep."""
        height = max(self.console.size.height - _FRAME, 1)
        name, counts = f"sweep {self._sweep.path.name}", self._records.counts
        finished = len(self.jobs) - counts[RUNNING] - self._records.num_to_come
        top = heading(name, self.times(now), finished, len(self.jobs), self.counts())
        return Group(top, Text(), job_table(self.jobs, now, height))

    def lines(self, now: float, *, last: bool) -> list[str]:  # noqa: ARG002
        """Return a line for each job that changed, and the progress once a minute."""
        lines = []
        for num, job in self.jobs.items():
            before = self._states.get(num)
            if job.record.state != before:
                self._states[num] = job.record.state
                if before is not None or (job.record.started or 0.0) >= self.started:
                    lines.append(f"{clock(now)} {self._line_of(num, now)}")
        if now - self.printed_at >= _LINE_EVERY_S:
            self.printed_at = now
            lines.append(f"{clock(now)} {self.counts()}; {self.times(now)}")
            running = (num for num, job in self.jobs.items() if job.record.state == RUNNING)
            lines += [f"         {self._line_of(num, now)}" for num in running]
        return lines

    def _line_of(self, num: int, now: float) -> str:
        """Return one job in one line."""
        job = self.jobs[num]
        parts = [f"{job.record.state:<8}{job.label}"] + ([job.phase] if job.phase else [])
        for name, cell in zip(NAMES, cells_of(job, now), strict=True):
            parts += [f"{name} {cell}".strip()] if cell else []
        if job.was_interrupted:
            parts.append(f"{job.record.error} ({relative_path(self._sweep.log_of(num))})")
        return "  ".join(parts)

    def counts(self) -> str:
        """Return how many jobs are in each state: 2 done, 2 running, 6 waiting."""
        counts = self._records.counts
        return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])

    def times(self, now: float) -> str:
        """Return how long the sweep has taken and will still take."""
        return times(now - self.started, self._seconds_left(now))

    def _seconds_left(self, now: float) -> float | None:
        """Estimate the remaining seconds of the sweep; None if they are unknown."""
        running = [job for job in self.jobs.values() if job.record.state == RUNNING]
        known = {id(job): left for job in running if (left := job.seconds_left(now)) is not None}
        each = self._records.seconds_per_job
        if each is None and known:
            each = fmean(
                now - (job.record.started or now) + known[id(job)]
                for job in running
                if id(job) in known
            )
        if each is None:
            return None
        num_unknown = len(running) - len(known) + self._records.num_to_come
        return (sum(known.values()) + num_unknown * each) / max(len(running), 1)


def phase_of_start(folder: RunFolder) -> str:
    """Return what a run is doing before its first step."""
    if folder.warm_start.is_dir():
        return "warm start"
    statuses = read_statuses(folder)
    servers = [status for name, status in statuses.items() if name.startswith("inference")]
    starting = next((server for server in servers if server.phase != "serving"), None)
    slowest = starting or statuses.get("trainer.rank0")
    return slowest.phase.partition(" (")[0] if slowest else "starting"


def clock(now: float) -> str:
    """Return the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(now))


def cells_of(job: JobView, now: float) -> list[str]:
    """Return step, reward, evaluation and time of a job, empty if unknown."""
    run, record = job.run, job.record
    if not run.rows:
        since = record.started if record.state == RUNNING else None
        return ["", "", "", duration(now - since) if since else ""]
    rewards = list(run.rewards.values())[-10:]
    evaluated = run.rows[-1].get("eval/reward")
    took = (record.ended or now) - (record.started or now)
    left = job.seconds_left(now)
    return [
        f"{run.done}/{run.max_steps}",
        number(fmean(rewards)) if rewards else "",
        number(evaluated) if evaluated is not None else "",
        f"{duration(left)} left" if left and left > 0 else duration(took),
    ]


def job_table(jobs: dict[int, JobView], now: float, height: int) -> RenderableType:
    """Return a table with at most `height` jobs, and how many are missing."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(width=8, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(name, "dim") for name in ("", "", *NAMES)))
    shown = sorted(jobs, key=lambda num: _SHOWN_FIRST.index(jobs[num].record.state))[:height]
    for num in sorted(shown):
        table.add_row(*_row_of(jobs[num], now))
    if more := len(jobs) - len(shown):
        table.add_row("", Text(f"and {more} more", "dim"))
    return table


def _row_of(job: JobView, now: float) -> list[Text]:
    """Return a job's line of the table, with its state in colour."""
    state, style = job.record.state, _STYLES[job.record.state]
    aside = job.record.error if job.was_interrupted else job.phase
    label = f"{job.label}: {aside}" if aside else job.label
    rest = style if state == WAITING else ""
    cells = [Text(cell, rest) for cell in cells_of(job, now)]
    return [Text(state, style), Text(label, style if state == FAILED else rest), *cells]
