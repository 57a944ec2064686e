"""The screen of a run, and the summary that the supervisor prints at the end.

The supervisor calls `Screen.update()` about four times per second. Each call reads new metrics,
statuses and warnings from files of the run folder, which the other processes write.
"""

import re
import time
from collections.abc import Sequence
from statistics import mean

from rich.console import Console, RenderableType

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import (
    MetricsTail,
    Row,
    column,
    mean_of,
    read_metrics,
    steps_done,
    total_seconds,
)
from rl.runtime.start_record import resume_command
from rl.runtime.status import read_statuses
from rl.runtime.stop_when import is_fulfilled
from rl.runtime.warning_lines import WarningTail
from rl.terminal.display import Display
from rl.terminal.panel import ALARMS, RunView, format_number, format_time, live_panel, time_shares

FIRST_STEPS = 5  # number of first step lines that do not wait for LINE_INTERVAL_S
_EVALUATED = re.compile(r"eval/(reward|pass)[^/]*(/[^/]*)?$")  # excludes eval/reward/exact/turn_0
LINE_INTERVAL_S = 2.0  # minimum seconds between two lines of later steps
STEP_LINE = (  # (label, metric, number format, width) of each number in a step line
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
    """The display of one run: a live panel on a terminal, or step lines in a log file."""

    def __init__(
        self,
        folder: RunFolder,
        max_steps: int,
        console: Console | None = None,
        *,
        num_saved: int | None = None,
        is_main: bool = True,
    ) -> None:
        """The first `update` skips old metrics of steps >= `num_saved`, which a resume repeats."""
        super().__init__(console)
        self.folder = folder
        self.view = RunView(folder.name, max_steps)
        self._tail, self._warnings = MetricsTail(folder), WarningTail(folder)
        self._num_saved = num_saved
        self._is_main = is_main  # of a warm start, a log file gets only the last step's line
        self._row: Row | None = None  # the newest line of metrics that was printed
        self._printed_at = float("-inf")  # unix seconds of the latest printed step line
        self._num_lines = 0
        self._phases = set[tuple[str, str]]()  # (process, phase) pairs that were printed

    def read(self) -> None:
        rows, num_saved, self._num_saved = self._tail.read(), self._num_saved, None
        for row in rows:
            if num_saved is None or row["step"] < num_saved:
                self.view.add(row)
        self.view.statuses = read_statuses(self.folder)
        for line in self._warnings.read():
            self.note(line, "yellow")

    def picture(self, now: float) -> RenderableType:
        return live_panel(self.view, now)

    def lines(self, now: float, *, last: bool) -> list[str]:
        """Return new lines for a log file: process phases until the first step ends, then steps."""
        view = self.view
        if not view.rows or (view.rows[-1].get("time") or 0.0) < view.started:  # no new step yet
            return self._phase_lines() if self._is_main and not last else []
        due = self._num_lines < FIRST_STEPS or now - self._printed_at >= LINE_INTERVAL_S
        due &= self._is_main
        if view.rows[-1] is self._row or not (due or last or view.done >= view.max_steps):
            return []
        self._row, self._printed_at = view.rows[-1], now
        self._num_lines += 1
        return [step_line(view, now)]

    def _phase_lines(self) -> list[str]:
        lines = []
        for process, status in self.view.statuses.items():
            # Only rank 0 is shown, because all ranks pass through the same phases.
            is_shown = ".rank" not in process or process.endswith(".rank0")
            if is_shown and (process, status.phase) not in self._phases:
                self._phases.add((process, status.phase))
                lines.append(f"{time.strftime('%H:%M:%S')} {process}: {status.doing}")
        return lines


def step_line(view: RunView, now: float) -> str:
    """Return a line about the newest step. Leave out missing metrics and a failure rate of 0."""
    row, width = view.rows[-1], len(str(view.max_steps))
    parts = [f"{view.done:>{width}}/{view.max_steps} steps"]
    for label, name, spec, size in STEP_LINE:
        if row.get(name) is not None and (row[name] or name not in ALARMS):
            parts.append(f"{label} {format_number(row[name], spec):>{size}}")
    return "  ".join([*parts, view.times(now)])


def format_first_and_last(rewards: Sequence[float]) -> str:
    half = len(rewards) // 2
    if not half:
        return f"{rewards[0]:.3f}"
    first, last = min(5, half), min(10, half)
    return (
        f"{mean(rewards[:first]):.3f} (first {first}) -> {mean(rewards[-last:]):.3f} (last {last})"
    )


def final_summary(folder: RunFolder) -> str:
    """Return a text with results, files, model, and the command that resumes an unfinished run."""
    rows = read_metrics(folder)
    seconds = total_seconds(rows)
    steps = steps_done(rows)
    lines = [("run", f"{folder.name}: {steps} steps in {format_time(seconds)}")]
    if rewards := column(rows, "train/reward"):
        best = max(rewards)
        at = next(row["step"] for row in rows if row.get("train/reward") == best)
        # The step lines count from 1 and the files from 0, so name the file.
        where = folder.rollouts_of(at).relative_to(folder.path)
        lines.append(("reward", f"{format_first_and_last(rewards)}, best {best:.3f} in {where}"))
    evaluated = {name for row in rows for name in row if _EVALUATED.match(name)}
    for name in sorted(evaluated, key=lambda name: (name != "eval/reward", name))[:4]:
        if values := column(rows, name):
            lines.append((name, f"{values[0]:.3f} -> {values[-1]:.3f}"))
    if failed := mean_of(rows, "rollout/errors"):
        lines.append(("failed", f"{failed:.1%} of the rollouts (errors: rollouts/*.jsonl)"))
    if shares := time_shares(rows):
        lines.append(("time", shares))
    lines.append(("files", f"{folder}/  metrics.jsonl, rollouts/, logs/"))
    if exports := folder.exports():
        lines.append(("model", str(exports[-1])))
    config = folder.read_yaml(folder.config)
    max_steps = config.get("max_steps")  # the user may have edited the file
    is_reached = isinstance(max_steps, int) and steps >= max_steps
    if not is_reached and not is_fulfilled(config.get("stop_when"), rows):
        lines.append(("go on" if folder.num_saved_steps() else "again", resume_command(folder)))
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)
