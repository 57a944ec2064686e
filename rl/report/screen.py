"""What the person at the terminal sees: a live panel, or plain lines where there is no terminal.

The supervisor polls `update()` about four times a second. It reads what other processes left in the
run folder since the last call, and whatever goes wrong here is said once and never reaches the run.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Sequence
from statistics import mean
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rl.report.finished_runs import result_of, resume_command, steps_done
from rl.report.panel import ALARMS, SLOW_S, RunView, duration, is_slow, live_panel, number
from rl.run.folder import RunFolder
from rl.run.metrics import (
    MetricsTail,
    Row,
    column,
    mean_of,
    read_metrics,
    time_split,
    total_seconds,
)
from rl.run.status import PartStatus, read_statuses
from rl.run.warning_lines import WarningTail

FIRST_STEPS = 5  # printed without a limit where there is no terminal
LINE_INTERVAL_S = 2.0  # between two step lines after those
LINE = (  # label, metric, format, width: of a plain step line
    ("reward", "train/reward", "", 8),
    ("loss", "train/loss", "", 8),
    ("grad norm", "train/grad_norm", "", 8),
    ("tokens/s", "rollout/tokens_per_s", ",.0f", 8),
    ("staleness", "staleness/mean", ".2f", 5),
    ("failed", "rollout/errors", ".1%", 5),
    ("seconds", "time/step", ".1f", 6),
    ("eval", "eval/reward", "", 8),
)

log = logging.getLogger(__name__)


class Screen:
    """A context manager that shows one run for as long as it lasts."""

    def __init__(
        self,
        folder: RunFolder,
        max_steps: int,
        console: Console | None = None,
        *,
        num_saved: int | None = None,
    ) -> None:
        """Show nothing yet.

        Args:
            folder: of the run.
            max_steps: of the run.
            console: standard output unless given.
            num_saved: steps that the run goes on after; later ones that it has done already are
                done again.

        """
        self.folder = folder
        self.view = RunView(folder.name, max_steps)
        self._tail, self._warnings = MetricsTail(folder), WarningTail(folder)
        self._console = console or Console()
        self._num_saved, self._alone = num_saved, TerminalLock()
        self._painter: LivePainter | PlainPainter | None = None  # None: not open, or given up

    def __enter__(self) -> "Screen":
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        terminal = terminal and self._console.file.isatty()  # FORCE_COLOR alone is no terminal
        terminal = terminal and self._alone.take(self._console.file)
        self._painter = LivePainter(self._console) if terminal else PlainPainter(self._console)
        self.update()
        return self

    def __exit__(self, *exception: object) -> None:
        self._guarded(last=True)
        self._alone.release()

    def update(self) -> None:
        """Read what is new and show it. Cheap, and raises nothing."""
        self._guarded(last=False)

    def _guarded(self, last: bool) -> None:
        if self._painter is None:
            return
        try:
            self._read()
            for line in self._warnings.read():
                self._painter.warn(line)
            self._painter.paint(self.view, time.time(), last)
        except Exception as error:  # noqa: BLE001 (a closed terminal must not end the run)
            log.warning("the screen is off from here on: %s: %s", type(error).__name__, error)
            painter, self._painter = self._painter, None
            with contextlib.suppress(Exception):
                painter.close()

    def _read(self) -> None:
        rows, num_saved, self._num_saved = self._tail.read(), self._num_saved, None
        for row in rows:
            if num_saved is None or row["step"] < num_saved:
                self.view.add(with_evaluation(self.view, row))
        self.view.statuses = read_statuses(self.folder)


class TerminalLock:
    """A terminal has room for one live panel; of runs side by side the others print lines."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, file: IO[str]) -> bool:
        """True where nobody else draws on this terminal, or where nobody can know."""
        with contextlib.suppress(OSError, ValueError):  # no file behind it, or no such device
            self._descriptor = os.open(os.ttyname(file.fileno()), os.O_RDONLY | os.O_NOCTTY)
            # On the device itself, which all runs of a terminal share; it ends with the process.
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def release(self) -> None:
        """Let another have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class LivePainter:
    """The panel, redrawn in place when a number changed or a second passed."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._drawn: object = None

    def paint(self, view: RunView, now: float, last: bool) -> None:
        """Draw when there is something to draw; the last picture stays."""
        picture = (view.done, view.statuses, int(now))
        if picture != self._drawn:
            self._drawn = picture
            self._live.start()  # only the first call does something
            self._live.update(live_panel(view, now), refresh=True)
        if last:
            self.close()

    def warn(self, line: str) -> None:
        """Print a line above the picture."""
        self._live.console.print(Text(line, "yellow"))

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()
        self._live.console.print()


class PlainPainter:
    """Lines for a log file: the phases of the start, the steps, and whoever takes long."""

    def __init__(self, console: Console) -> None:
        self._file = console.file
        self._row: Row | None = None  # the newest line that was printed
        self._printed_at = float("-inf")  # unix seconds
        self._num_lines = 0
        self._next_age: dict[tuple[str, str], float] = {}  # s, by part and phase: to speak again

    def paint(self, view: RunView, now: float, last: bool) -> None:
        """Print the lines that are due."""
        if not last:
            self._statuses(view, now)
        if not is_fresh(view) or view.rows[-1] is self._row:
            return
        due = self._num_lines < FIRST_STEPS or now - self._printed_at >= LINE_INTERVAL_S
        if due or last or view.done >= view.max_steps:
            self._row, self._printed_at = view.rows[-1], now
            self._num_lines += 1
            self._print(step_line(view, now))

    def warn(self, line: str) -> None:
        """Print a line as it is."""
        self._print(line)

    def close(self) -> None:
        """Nothing to give back."""

    def _statuses(self, view: RunView, now: float) -> None:
        for part, status in view.statuses.items():
            key, age = (part, status.phase), now - status.since
            if ".rank" in part and not part.endswith(".rank0"):
                continue  # the ranks go in step
            if key not in self._next_age and not is_fresh(view):  # start-up: every phase once
                self._next_age[key] = SLOW_S
                self._print(status_line(part, status, ""))
            elif is_slow(status, now) and age >= self._next_age.get(key, SLOW_S):
                self._next_age[key] = 2 * age  # a log of hours stays short
                self._print(status_line(part, status, f" (for {duration(age)})"))

    def _print(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def with_evaluation(view: RunView, row: Row) -> Row:
    """The line with the numbers of the last evaluation; one of an evaluation alone joins the last.

    The last version is evaluated after the last step.
    """
    last = view.rows[-1] if view.rows else {}
    if row["step"] == view.max_steps and last:
        return last | row | {"step": last["step"]}
    return {name: value for name, value in last.items() if name.startswith("eval/")} | row


def is_fresh(view: RunView) -> bool:
    """True once a step was done since the screen opened, not only before a resume."""
    return bool(view.rows) and (view.rows[-1].get("time") or 0.0) >= view.started


def step_line(view: RunView, now: float) -> str:
    """The newest step in one line; what the run does not measure is left out."""
    row, width = view.rows[-1], len(str(view.max_steps))
    parts = [f"{view.done:>{width}}/{view.max_steps} steps"]
    for label, name, spec, size in LINE:
        if row.get(name) is not None and (row[name] or name not in ALARMS):
            parts.append(f"{label} {number(row[name], spec):>{size}}")
    return "  ".join([*parts, view.times(now)])


def status_line(part: str, status: PartStatus, age: str) -> str:
    """One process in one line."""
    return f"{time.strftime('%H:%M:%S')} {part}: {status.doing}{age}"


def course(rewards: Sequence[float]) -> str:
    """Reward at first and at last, of steps that do not overlap."""
    half = len(rewards) // 2
    if not half:
        return f"{rewards[0]:.3f}"
    first, last = min(5, half), min(10, half)
    return (
        f"{mean(rewards[:first]):.3f} (first {first}) -> {mean(rewards[-last:]):.3f} (last {last})"
    )


def final_summary(folder: RunFolder) -> str:
    """The last word on one run, in aligned lines."""
    rows = read_metrics(folder)
    seconds = total_seconds(rows)
    steps = steps_done(rows)
    lines = [("run", f"{folder.name}: {steps} steps in {duration(seconds)}")]
    if rewards := column(rows, "train/reward"):
        best = max(rewards)
        at = next(row["step"] for row in rows if row.get("train/reward") == best)
        lines.append(("reward", f"{course(rewards)}, best {best:.3f} at step {at}"))
    evaluated = {
        name for row in rows for name in row if name.startswith(("eval/reward", "eval/pass"))
    }
    for name in sorted(evaluated, key=lambda name: (name != "eval/reward", name))[:4]:
        if values := column(rows, name):
            lines.append((name, f"{values[0]:.3f} -> {values[-1]:.3f}"))
    if failed := mean_of(rows, "rollout/errors"):
        lines.append(("failed", f"{failed:.1%} of the rollouts (error in rollouts/*.jsonl)"))
    if tokens := sum(column(rows, "train/tokens")):
        lines.append(("tokens", f"{tokens:,.0f}, {tokens / max(seconds, 1e-9):,.0f} a second"))
    if total := sum((split := time_split(rows)).values()):
        shares = [f"{name.replace('_', ' ')} {part / total:.0%}" for name, part in split.items()]
        lines.append(("time", ", ".join(shares[:6])))
    for label, unit in (("staleness", ""), ("mismatch", "_abs")):
        if (average := mean_of(rows, f"{label}/mean{unit}")) is not None:
            highest = max(column(rows, f"{label}/max{unit}"), default=average)
            lines.append((label, f"{average:.3g} on average, {highest:.3g} at most"))
    lines += _what_is_there(folder, steps)
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)


def _what_is_there(folder: RunFolder, steps: int) -> list[tuple[str, str]]:
    """Files, model, and how to go on where there is something left to do."""
    lines = [("files", f"{folder}/  metrics.jsonl, rollouts/, logs/")]
    if exports := folder.exports():
        lines.append(("model", str(exports[-1])))
    if steps < result_of(folder).max_steps:
        label = "go on" if folder.num_saved_steps() else "again"
        lines.append((label, resume_command(folder)))
    return lines
