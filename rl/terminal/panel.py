"""Draw the live panel of a run: progress, reward, metrics, times and process statuses."""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl.runtime.metrics import Row, stage_seconds, total_seconds
from rl.runtime.status import ProcessStatus

WINDOW = 20  # number of last steps from which time per step and remaining time are computed
# The panel highlights a process that stays in one phase for longer than SLOW_S seconds, unless the
# text of the phase starts with one of NEVER_SLOW.
SLOW_S = 30.0
NEVER_SLOW = ("serving", "sampling", "running", "watching", "ready", "idle", "done")
PROCESSES = {"inference": 0, "rollouts": 1, "trainer": 2}  # position of each process in the panel
LABEL, VALUE = 13, 9  # widths, in characters, of the columns with labels and with numbers
STATISTICS = (  # (label, metric, number format); the panel shows three per line
    ("loss", "train/loss", ""),
    ("entropy", "train/entropy", ""),
    ("grad norm", "train/grad_norm", ""),
    ("learning rate", "train/learning_rate", ".1e"),
    ("clipped", "train/clip_fraction", ".1%"),
    ("no spread", "rollout/zero_spread", ".1%"),
    ("tokens/s", "rollout/tokens_per_s", ",.0f"),
    ("mean length", "rollout/mean_length", ",.1f"),
    ("truncated", "rollout/truncated", ".1%"),
    ("staleness", "staleness/mean", ".2f"),
    ("max staleness", "staleness/max", ".0f"),
    ("mismatch", "mismatch/mean_abs", ".5f"),
)
ALARMS = {  # metric -> warning that the panel shows if the metric is not 0
    "train/skipped": "step skipped: loss or gradient not finite",
    "rollout/errors": "{:.1%} of rollouts failed",
}


@dataclass
class RunView:
    """The data of the panel: the reward of each step, and the last WINDOW lines of metrics."""

    run_name: str
    max_steps: int
    started: float = field(default_factory=time.time)  # unix seconds when the screen opened
    done: int = 0  # number of finished optimizer steps
    rows: list[Row] = field(default_factory=list)  # the last lines of metrics.jsonl, oldest first
    rewards: dict[int, float] = field(default_factory=dict)  # mean reward by step
    statuses: dict[str, ProcessStatus] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add a line of metrics. If a resumed run repeats a step, drop the lines from that step on.

        A line without an evaluation gets the results of the latest evaluation. The evaluation after
        the last step has a line of its own, which is merged into the line of the last step.
        """
        last = self.rows[-1] if self.rows else {}
        if row["step"] == self.max_steps and last:
            row = last | row | {"step": last["step"]}
        row = {name: value for name, value in last.items() if name.startswith("eval/")} | row
        step = row["step"]
        self.done = step + 1
        self.rows = [*(old for old in self.rows if old["step"] < step), row][-WINDOW:]
        while self.rewards and next(reversed(self.rewards)) >= step:
            self.rewards.popitem()
        if row.get("train/reward") is not None:
            self.rewards[step] = row["train/reward"]

    def times(self, now: float) -> str:
        return elapsed_and_left(now - self.started, self.seconds_left(now))

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated remaining seconds; None before the first and after the last step."""
        if not self.rows or self.done >= self.max_steps:
            return None
        left = (self.max_steps - self.done) * total_seconds(self.rows) / len(self.rows)
        # Subtract the time since the last step, so that the estimate shrinks between steps.
        return left - (now - (self.rows[-1].get("time") or now))


def live_panel(view: RunView, now: float) -> RenderableType:
    count = f"{view.done:>{len(str(view.max_steps))}} of {view.max_steps} steps"
    blocks = [heading(view.run_name, view.times(now), view.done, view.max_steps, count)]
    if view.rows:
        seconds = f"{'time per step':<{LABEL}}  {sum(stage_seconds(view.rows).values()):.2f} s  "
        times = Text(seconds + time_shares(view.rows), "dim", no_wrap=True, overflow="ellipsis")
        blocks += [statistics_table(view), times]
    if view.statuses:
        blocks.append(process_table(view.statuses, now))
    return Group(*[part for block in blocks for part in (block, Text())][:-1])


def heading(title: str, times: str, done: int, total: int, count: str) -> RenderableType:
    """Return two lines: title and times, then a progress bar followed by the text `count`."""
    upper, lower = (Table.grid(expand=True, padding=(0, 2, 0, 0)) for _ in range(2))
    for table in (upper, lower):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(justify="right", no_wrap=True)
    upper.add_row(Text(title, "bold"), Text(times, "dim"))
    bar = ProgressBar(max(total, 1), done, complete_style="cyan", finished_style="cyan")
    lower.add_row(bar, count)
    return Group(upper, lower)


def statistics_table(view: RunView) -> RenderableType:
    """Return a table of rewards and of the last step's metrics, with the warnings of ALARMS."""
    row, rewards = view.rows[-1], list(view.rewards.values())
    last = rewards[-10:]
    cells = [
        ("reward", format_number(last[-1] if last else None)),
        (f"last {len(last) or 10}", format_number(fmean(last) if last else None)),
        ("best", format_number(max(rewards, default=None))),
        *((label, format_number(row.get(name), spec)) for label, name, spec in STATISTICS),
    ]
    if row.get("eval/reward") is not None:
        cells.append(("evaluation", format_number(row["eval/reward"])))
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(width=LABEL, style="dim", no_wrap=True)
        table.add_column(width=VALUE, justify="right", no_wrap=True)
    for start in range(0, len(cells), 3):
        table.add_row(*chain(*cells[start : start + 3]))
    alarms = [what.format(row[name]) for name, what in ALARMS.items() if row.get(name)]
    return Group(table, Text(", ".join(alarms), "yellow")) if alarms else table


def time_shares(rows: list[Row]) -> str:
    """Return each stage's share of the step time as text, as in `update 60%, push 20%`."""
    split = stage_seconds(rows)
    total = sum(split.values()) or 1.0
    return ", ".join(f"{name.replace('_', ' ')} {s / total:.0%}" for name, s in split.items() if s)


def process_table(statuses: dict[str, ProcessStatus], now: float) -> RenderableType:
    """Return a table of the processes. Ranks or servers in the same phase share a line."""
    shared: dict[tuple[str, str], list[tuple[str, ProcessStatus]]] = defaultdict(list)
    for process, status in statuses.items():
        name = process.partition(".")[0].rstrip("0123456789")
        shared[name, status.phase].append((process, status))
    num_lines = Counter(name for name, _ in shared)
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(width=LABEL, style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    for (name, _), members in sorted(shared.items(), key=lambda i: PROCESSES.get(i[0][0], 3)):
        process, status = min(members, key=lambda member: member[1].since)
        label = process if num_lines[name] > 1 else name
        label = f"{name} x{len(members)}" if len(members) > 1 else label
        age = now - status.since
        style = "yellow" if age > SLOW_S and not status.doing.startswith(NEVER_SLOW) else ""
        table.add_row(label, Text(status.doing, style), Text(format_time(age), style))
    return table


def format_number(value: float | None, spec: str = "") -> str:
    """Format a number by `spec`. Without one, use few digits, as in 12,345 or 0.734 or 2.1e-05."""
    if value is None:
        return "-"
    size = abs(value)
    fixed = ",.0f" if size >= 1000 else ".1f" if size >= 100 else ".3f"
    return format(value, spec or (".1e" if 0 < size < 0.001 else fixed))


def elapsed_and_left(elapsed: float, left: float | None) -> str:
    """Format elapsed and remaining seconds, as in `1 m 40 s, about 3 m 29 s left`."""
    about = f", about {format_time(left)} left" if left and left > 0 else ""
    return f"{format_time(elapsed)}{about}"


def format_time(seconds: float) -> str:
    """Format seconds, as in 8 s or 2 m 05 s or 1 h 04 m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
