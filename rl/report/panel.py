"""The live picture of a run: progress, reward, the numbers, where the time goes, who waits.

Pure drawing: a RunView goes in, something rich can print comes out. Nothing here reads a file.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from rl.run.metrics import Row, time_split, total_seconds
from rl.run.status import PartStatus

WINDOW = 20  # steps over which times and the remaining time are averaged
SLOW_S = 30.0  # a phase that lasts longer is highlighted
STEADY = ("serving", "sampling", "running", "watching", "ready", "idle", "done")  # never too long
PARTS = {"inference": 0, "rollouts": 1, "trainer": 2}  # in the order of the data
LABEL, VALUE = 13, 9  # characters of a name and of its number
ACTIVITIES = {  # of a step, in the order they are drawn; `other` is whatever else takes time
    "wait": "yellow",
    "update": "cyan",
    "forward_backward": "cyan",
    "optimizer": "blue",
    "push": "magenta",
    "other": "bright_black",
}
STATISTICS = (  # name on the screen, metric, format; three to a line
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
    ("at most", "staleness/max", ".0f"),
    ("mismatch", "mismatch/mean_abs", ".5f"),
)
ALARMS = {  # metrics that should be zero
    "train/skipped": "step skipped: loss or gradient not finite",
    "train/nonfinite_steps": "{:.0f} steps skipped: gradient not finite",
    "rollout/errors": "{:.1%} of rollouts failed",
}


@dataclass
class RunView:
    """What the screen remembers of a run: every reward, and the last WINDOW lines."""

    run_name: str
    max_steps: int
    started: float = field(default_factory=time.time)  # unix seconds
    done: int = 0  # optimizer steps
    rows: list[Row] = field(default_factory=list)  # oldest first
    rewards: dict[int, float] = field(default_factory=dict)  # by step
    statuses: dict[str, PartStatus] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take in the next line; one that repeats an earlier step replaces all from there on."""
        step = row["step"]
        self.done = step + 1
        self.rows = [*(old for old in self.rows if old["step"] < step), row][-WINDOW:]
        while self.rewards and next(reversed(self.rewards)) >= step:
            self.rewards.popitem()
        if row.get("train/reward") is not None:
            self.rewards[step] = row["train/reward"]

    def times(self, now: float) -> str:
        """How long the run has taken and will still take."""
        elapsed, left = duration(now - self.started), self.seconds_left(now)
        return f"{elapsed}, about {duration(left)} left" if left and left > 0 else elapsed

    def seconds_left(self, now: float) -> float | None:
        """What the run will still take by its last steps, None where that is not known."""
        if not self.rows or self.done >= self.max_steps:
            return None
        left = (self.max_steps - self.done) * total_seconds(self.rows) / len(self.rows)
        # The step under way has used up some of it already, so the time left counts down.
        return left - (now - (self.rows[-1].get("time") or now))


def live_panel(view: RunView, now: float) -> RenderableType:
    """The whole picture at `now` (unix seconds)."""
    blocks: list[RenderableType] = [heading(view, now)]
    if view.rows:
        blocks += [reward_chart(view), statistics(view.rows[-1]), time_bar(view.rows)]
    if view.statuses:
        blocks.append(processes(view.statuses, now))
    spaced = [part for block in blocks for part in (block, Text())]
    return Group(*spaced[:-1])


def heading(view: RunView, now: float) -> RenderableType:
    """Name and times, and below them the progress bar."""
    title, progress = (Table.grid(expand=True, padding=(0, 2, 0, 0)) for _ in range(2))
    for table in (title, progress):
        table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column(justify="right", no_wrap=True)
    title.add_row(Text(view.run_name, "bold"), Text(view.times(now), "dim"))
    bar = ProgressBar(view.max_steps, view.done, complete_style="cyan", finished_style="cyan")
    progress.add_row(bar, f"{view.done:>{len(str(view.max_steps))}} of {view.max_steps} steps")
    return Group(title, progress)


def reward_chart(view: RunView) -> RenderableType:
    """Reward now, recent and best, and of the last evaluation, beside its course over the run."""
    rewards = list(view.rewards.values())
    last, evaluated = rewards[-10:], view.rows[-1].get("eval/reward")
    labels = f"reward\nlast {len(last) or 10}\nbest"
    values = [last[-1], fmean(last), max(rewards)] if last else [None] * 3
    if evaluated is not None:
        labels, values = f"{labels}\nevaluation", [*values, evaluated]
    numbers = Text("\n".join(number(value) for value in values))
    numbers.stylize("bold", 0, numbers.plain.index("\n"))
    return beside(Text(labels), numbers, Chart(rewards, rows=3))


def statistics(row: Row) -> RenderableType:
    """The last step's numbers in three columns, and a line for what should be zero and is not."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(width=LABEL, style="dim", no_wrap=True)
        table.add_column(width=VALUE, justify="right", no_wrap=True)
    for start in range(0, len(STATISTICS), 3):
        line = STATISTICS[start : start + 3]
        cells = [(label, number(row.get(name), spec)) for label, name, spec in line]
        table.add_row(*chain(*cells))
    alarms = [what.format(row[name]) for name, what in ALARMS.items() if row.get(name)]
    return Group(table, Text(", ".join(alarms), "yellow")) if alarms else table


def time_bar(rows: list[Row]) -> RenderableType:
    """Where the seconds of the last steps went: one bar, and its legend with shares."""
    split = time_split(rows)
    if not (total := sum(split.values())):
        return Text("no times yet", "dim")
    shares = {name: split[name] / total for name in ACTIVITIES if name in split}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    legend = Text(no_wrap=True, overflow="ellipsis")
    for name, share in shares.items():
        label = f"{name.replace('_', ' ')} {share:.0%}  "
        legend.append("■ ", ACTIVITIES[name]).append(label, "dim")
    return Group(beside(Text("time per step"), Text(f"{total:.2f} s"), SplitBar(shares)), legend)


def processes(statuses: dict[str, PartStatus], now: float) -> RenderableType:
    """One line per process; ranks in the same phase share one."""
    shared: dict[tuple[str, str], list[tuple[str, PartStatus]]] = defaultdict(list)
    for part, status in statuses.items():
        name = part.partition(".")[0].rstrip("0123456789")
        shared[name, status.phase].append((part, status))
    ranks = Counter(name for name, _ in shared)
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(width=LABEL, style="dim", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    for (name, _), members in sorted(shared.items(), key=lambda i: PARTS.get(i[0][0], 3)):
        part, status = min(members, key=lambda member: member[1].since)
        label = f"{name} x{len(members)}" if len(members) > 1 else part if ranks[name] > 1 else name
        style = "yellow" if is_slow(status, now) else ""
        table.add_row(label, Text(status.doing, style), Text(duration(now - status.since), style))
    return table


def is_slow(status: PartStatus, now: float) -> bool:
    """True when the phase has lasted longer than a phase should."""
    return now - status.since > SLOW_S and not status.doing.startswith(STEADY)


def number(value: float | None, spec: str = "") -> str:
    """A number by its format, or at a steady width without one: 12,345, 123.4, 0.734, 2.1e-05."""
    if value is None:
        return "-"
    size = abs(value)
    steady = ",.0f" if size >= 1000 else ".1f" if size >= 100 else ".3f"
    return format(value, spec or (".1e" if 0 < size < 0.001 else steady))


def beside(label: Text, value: Text, picture: RenderableType) -> RenderableType:
    """Name and number in the columns of the statistics, and a picture in the rest of the line."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(width=LABEL, style="dim")
    table.add_column(width=VALUE, justify="right")
    table.add_column(ratio=1)
    table.add_row(label, value, picture)
    return table


class SplitBar:
    """Shares of a whole as one bar of coloured lengths."""

    def __init__(self, shares: dict[str, float]) -> None:
        self.shares = shares

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        position, drawn = 0.0, 0
        for name, share in self.shares.items():
            position += share
            end = round(position * options.max_width)  # rounding the ends keeps the whole exact
            yield Segment("━" * (end - drawn), Style.parse(ACTIVITIES[name]))
            drawn = end
        yield Segment.line()


def duration(seconds: float) -> str:
    """A length of time as people say it: 8 s, 2 m 05 s, 1 h 04 m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


class Chart:
    """Values as filled columns of eighths, oldest left; several share a column when they must."""

    def __init__(self, values: list[float], rows: int) -> None:
        self.values, self.rows = values, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        size = -(-len(self.values) // options.max_width) or 1  # values per column
        means = [fmean(self.values[i : i + size]) for i in range(0, len(self.values), size)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (8 * self.rows - 1) / ((high - low) or 1.0)
        heights = [1 + round((mean - low) * scale) for mean in means]  # eighths, at least one
        for row in reversed(range(self.rows)):
            cells = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, height - 8 * row))] for height in heights)
            yield Text(cells, "cyan", no_wrap=True)
