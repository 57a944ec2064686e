"""The one screen of jobs that run side by side: who is done, running, waiting, failed.

The jobs write into their logs, so the terminal is ours: a thread of the sweep's own process draws
a table in place, or prints lines where there is no terminal. It reads what the jobs leave in their
folders and records, and whatever goes wrong here is said once and never reaches a job.
"""

import logging
import time
from collections.abc import Mapping
from statistics import fmean
from threading import Event, Thread
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl.report.panel import duration, number
from rl.run.sweep_folder import DONE, FAILED, RUNNING, WAITING, SweepFolder
from rl.run.typed import as_typed
from rl.sweeps.view import JobView, SweepView

_TICK_S = 0.5
_LINE_EVERY_S = 60.0  # where there is no terminal
_FRAME = 6  # lines around the jobs
_STYLES = {DONE: "green", RUNNING: "", WAITING: "dim", FAILED: "red"}
_SHOWN_FIRST = (FAILED, RUNNING, DONE, WAITING)  # where not all of them have room

NAMES = ("steps", "reward", "eval", "")  # of a job's cells

log = logging.getLogger(__name__)


class SweepScreen:
    """A context manager that shows a sweep for as long as it lasts."""

    def __init__(self, sweep: SweepFolder, console: Console | None = None) -> None:
        self._view = SweepView(sweep)
        console = console or Console()
        terminal = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self._painter = LivePainter(console) if terminal else PlainPainter(console, time.time())
        self._end, self._thread = Event(), Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _show(self) -> None:
        try:
            while not self._end.wait(_TICK_S):
                self._paint()
            self._paint()
            self._painter.close()
        except Exception as error:  # noqa: BLE001 (a closed terminal must not end the sweep)
            log.warning("the screen is off from here on: %s: %s", type(error).__name__, error)

    def _paint(self) -> None:
        self._view.read()
        self._painter.paint(self._view, time.time())


class LivePainter:
    """The table, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def paint(self, view: SweepView, now: float) -> None:
        """Draw all of it."""
        self._live.start()  # only the first call does something
        height = max(self._live.console.size.height - _FRAME, 1)
        self._live.update(picture(view, now, height), refresh=True)

    def close(self) -> None:
        """Give the terminal back; the last picture stays."""
        self._live.stop()


class PlainPainter:
    """Lines for a log file: what changes, and every minute how far the jobs are."""

    def __init__(self, console: Console, now: float) -> None:
        self._file = console.file
        self._states: dict[int, str] = {}
        self._printed_at = now

    def paint(self, view: SweepView, now: float) -> None:
        """Print the lines that are due."""
        for num, job in view.jobs.items():
            before = self._states.get(num)
            if job.record.state != before:
                self._states[num] = job.record.state
                if before is not None or (job.record.started or 0.0) >= view.started:
                    self._print(f"{clock(now)} {line_of(view, num, now)}")
        if now - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = now
            self._print(f"{clock(now)} {view.counts()}; {view.times(now)}")
            for num, job in view.jobs.items():
                if job.record.state == RUNNING:
                    self._print(f"         {line_of(view, num, now)}")

    def close(self) -> None:
        """Nothing to give back."""

    def _print(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def line_of(view: SweepView, num: int, now: float) -> str:
    """One job in one line."""
    job = view.jobs[num]
    parts = [f"{job.record.state:<8}{job.label}"] + ([job.phase] if job.phase else [])
    for name, cell in zip(NAMES, cells_of(job, now), strict=True):
        parts += [f"{name} {cell}".strip()] if cell else []
    if broke_off(job):
        parts.append(f"{job.record.error} ({as_typed(view.sweep.log_of(num))})")
    return "  ".join(parts)


def broke_off(job: JobView) -> bool:
    """Whether a job was begun, and neither runs nor is done."""
    return job.record.state in (FAILED, WAITING) and job.record.started is not None


def clock(now: float) -> str:
    """The time of day."""
    return time.strftime("%H:%M:%S", time.localtime(now))


def cells_of(job: JobView, now: float) -> list[str]:
    """Step, reward, evaluation and time of a job, empty where there is none yet."""
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


def picture(view: SweepView, now: float, height: int) -> RenderableType:
    """The whole screen, with room for `height` jobs."""
    title, bar = (Table.grid(expand=True, padding=(0, 2, 0, 0)) for _ in range(2))
    for table in (title, bar):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(justify="right", no_wrap=True)
    title.add_row(Text(f"sweep {view.sweep.path.name}", "bold"), Text(view.times(now), "dim"))
    finished = len(view.jobs) - view.num_in(RUNNING) - view.num_to_come()
    bar.add_row(
        ProgressBar(max(len(view.jobs), 1), finished, complete_style="cyan", finished_style="cyan"),
        view.counts(),
    )
    return Group(title, bar, Text(), job_table(view.jobs, now, height))


def job_table(jobs: Mapping[int, JobView], now: float, height: int) -> RenderableType:
    """The jobs, and how many there is no room for."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(width=8, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for _ in range(4):
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*(Text(name, "dim") for name in ("", "", *NAMES)))
    shown = sorted(jobs, key=lambda num: _SHOWN_FIRST.index(jobs[num].record.state))[:height]
    for num in sorted(shown):
        table.add_row(*row_of(jobs[num], now))
    if more := len(jobs) - len(shown):
        table.add_row("", Text(f"and {more} more", "dim"))
    return table


def row_of(job: JobView, now: float) -> list[Text]:
    """A job's line of the table; what catches the eye is its state."""
    state, style = job.record.state, _STYLES[job.record.state]
    aside = job.record.error if broke_off(job) else job.phase
    label = f"{job.label}: {aside}" if aside else job.label
    rest = style if state == WAITING else ""
    cells = [Text(cell, rest) for cell in cells_of(job, now)]
    return [Text(state, style), Text(label, style if state == FAILED else rest), *cells]
