"""The terminal during a run and its summary at the end.

The supervisor calls `Screen.update()` about four times per second. The screen reads the files that
the other processes have written to the run folder since the last call.
"""

import time
from collections.abc import Sequence
from statistics import mean

import yaml
from rich.console import Console, RenderableType

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import (
    MetricsTail,
    Row,
    column,
    mean_of,
    read_metrics,
    steps_done,
    time_split,
    total_seconds,
)
from rl.runtime.start_record import load_yaml, resume_command
from rl.runtime.status import ProcessStatus, read_statuses
from rl.runtime.warning_lines import WarningTail
from rl.terminal.display import Display
from rl.terminal.panel import ALARMS, SLOW_S, RunView, duration, is_slow, live_panel, number

FIRST_STEPS = 5  # lines that are printed without a pause between them
LINE_INTERVAL_S = 2.0  # between two step lines after those
LINE = (  # label, metric, format, width: of a step line
    ("reward", "train/reward", "", 8),
    ("loss", "train/loss", "", 8),
    ("grad norm", "train/grad_norm", "", 8),
    ("tokens/s", "rollout/tokens_per_s", ",.0f", 8),
    ("staleness", "staleness/mean", ".2f", 5),
    ("failed", "rollout/errors", ".1%", 5),
    ("seconds", "time/step", ".1f", 6),
    ("eval", "eval/reward", "", 8),
)


class Screen(Display):
    """Shows one run."""

    def __init__(
        self,
        folder: RunFolder,
        max_steps: int,
        console: Console | None = None,
        *,
        num_saved: int | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            folder: of the run.
            max_steps: of the run.
            console: standard output if None.
            num_saved: steps in the checkpoint of a resumed run; it repeats the later ones.

        """
        super().__init__(console)
        self.folder = folder
        self.view = RunView(folder.name, max_steps)
        self._tail, self._warnings = MetricsTail(folder), WarningTail(folder)
        self._num_saved, self._log = num_saved, StepLog()

    def read(self) -> None:
        """Read metrics, statuses and warnings."""
        rows, num_saved, self._num_saved = self._tail.read(), self._num_saved, None
        for row in rows:
            if num_saved is None or row["step"] < num_saved:
                self.view.add(row)
        self.view.statuses = read_statuses(self.folder)
        for line in self._warnings.read():
            self.note(line, "yellow")

    def state(self) -> object:
        """Return what the panel depends on."""
        return self.view.done, self.view.statuses

    def picture(self, now: float) -> RenderableType:
        """Return the panel."""
        return live_panel(self.view, now)

    def lines(self, now: float, *, last: bool) -> list[str]:
        """Return the lines that are due."""
        return self._log.lines(self.view, now, last=last)


class StepLog:
    """Lines for a log file: the phases of the start, the steps, and phases that take long."""

    def __init__(self) -> None:
        self._row: Row | None = None  # the newest row that was printed
        self._printed_at = float("-inf")  # unix seconds
        self._num_lines = 0
        self._next_age: dict[tuple[str, str], float] = {}  # s, by process and phase: print again

    def lines(self, view: RunView, now: float, *, last: bool) -> list[str]:
        """Return the lines that are due."""
        lines = [] if last else self._statuses(view, now)
        if not has_new_step(view) or view.rows[-1] is self._row:
            return lines
        due = self._num_lines < FIRST_STEPS or now - self._printed_at >= LINE_INTERVAL_S
        if due or last or view.done >= view.max_steps:
            self._row, self._printed_at = view.rows[-1], now
            self._num_lines += 1
            lines.append(step_line(view, now))
        return lines

    def _statuses(self, view: RunView, now: float) -> list[str]:
        lines = []
        for process, status in view.statuses.items():
            key, age = (process, status.phase), now - status.since
            if ".rank" in process and not process.endswith(".rank0"):
                continue  # all ranks do the same
            if key not in self._next_age and not has_new_step(view):  # start-up: every phase once
                self._next_age[key] = SLOW_S
                lines.append(status_line(process, status, ""))
            elif is_slow(status, now) and age >= self._next_age.get(key, SLOW_S):
                self._next_age[key] = 2 * age  # so that a log of hours stays short
                lines.append(status_line(process, status, f" (for {duration(age)})"))
        return lines


def has_new_step(view: RunView) -> bool:
    """Return whether a step was done since the screen opened, not only before a resume."""
    return bool(view.rows) and (view.rows[-1].get("time") or 0.0) >= view.started


def step_line(view: RunView, now: float) -> str:
    """Return the newest step in one line, without metrics that the run does not have."""
    row, width = view.rows[-1], len(str(view.max_steps))
    parts = [f"{view.done:>{width}}/{view.max_steps} steps"]
    for label, name, spec, size in LINE:
        if row.get(name) is not None and (row[name] or name not in ALARMS):
            parts.append(f"{label} {number(row[name], spec):>{size}}")
    return "  ".join([*parts, view.times(now)])


def status_line(process: str, status: ProcessStatus, age: str) -> str:
    """Return the status of one process in one line."""
    return f"{time.strftime('%H:%M:%S')} {process}: {status.doing}{age}"


def first_and_last(rewards: Sequence[float]) -> str:
    """Return the mean reward of the first and of the last steps, which do not overlap."""
    half = len(rewards) // 2
    if not half:
        return f"{rewards[0]:.3f}"
    first, last = min(5, half), min(10, half)
    return (
        f"{mean(rewards[:first]):.3f} (first {first}) -> {mean(rewards[-last:]):.3f} (last {last})"
    )


def final_summary(folder: RunFolder) -> str:
    """Return the summary of one run in aligned lines."""
    rows = read_metrics(folder)
    seconds = total_seconds(rows)
    steps = steps_done(rows)
    lines = [("run", f"{folder.name}: {steps} steps in {duration(seconds)}")]
    if rewards := column(rows, "train/reward"):
        best = max(rewards)
        at = next(row["step"] for row in rows if row.get("train/reward") == best)
        lines.append(("reward", f"{first_and_last(rewards)}, best {best:.3f} at step {at}"))
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
    """Return files and model, and the command that resumes an unfinished run."""
    lines = [("files", f"{folder}/  metrics.jsonl, rollouts/, logs/")]
    if exports := folder.exports():
        lines.append(("model", str(exports[-1])))
    if not _is_finished(folder, steps):
        label = "go on" if folder.num_saved_steps() else "again"
        lines.append((label, resume_command(folder)))
    return lines


def _is_finished(folder: RunFolder, steps: int) -> bool:
    try:
        return steps >= load_yaml(folder.config.read_bytes())["max_steps"]
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        return False
