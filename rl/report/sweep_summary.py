"""What came out of several runs: a table by everything but the seed, also at the end of a sweep.

A run that stopped before max_steps counts as failed and stays out of its group's reward, but for
one that had nothing left to learn.
"""

import atexit
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from rl.report.finished_runs import RunResult, meaningful, result_of
from rl.run.folder import RunFolder
from rl.run.metrics import mean_of, total_seconds
from rl.run.sweep_folder import SWEEP_VARIABLE, sweep_of_this_process

LAST_STEPS = 10  # whose mean reward a run is judged by
COLUMNS = ("run", "seeds", "reward", "min..max", "steps", "minutes", "failed")


@dataclass
class RunGroup:
    """Runs over seeds."""

    runs: list[RunResult]
    label: str = ""
    rewards: list[float] = field(init=False)  # mean of the last steps, of each run that finished

    def __post_init__(self) -> None:
        means = [mean_of(r.rows[-LAST_STEPS:], "train/reward") for r in self.runs if not r.failed]
        self.rewards = [value for value in means if value is not None]

    def as_dict(self) -> dict[str, Any]:
        """The group's line of the summary, by column."""
        finished = [run for run in self.runs if not run.failed]
        return {
            "run": self.label,
            "seeds": len(self.runs),
            "reward": mean(self.rewards) if self.rewards else None,
            "min": min(self.rewards, default=None),
            "max": max(self.rewards, default=None),
            "steps": max(run.num_steps for run in self.runs),
            "minutes": mean([total_seconds(run.rows) / 60 for run in finished] or [0.0]),
            "failed": len(self.runs) - len(finished),
            "folders": [str(run.folder.path) for run in self.runs if run.folder],
            "errors": [run.error for run in self.runs if run.error],
        }


def compare(runs: Sequence[RunResult]) -> list[RunGroup]:
    """The runs in groups that differ in more than the seed, the best reward first."""
    members: list[list[RunResult]] = []
    # Runs that left a config go first: one without can only be told by its overrides.
    for run in sorted(runs, key=lambda run: run.config is None):
        home = next((group for group in members if group[0].same_as(run)), None)
        if home is None:
            members.append([run])
        else:
            home.append(run)
    groups = [RunGroup(runs, label) for runs, label in zip(members, labels(members), strict=True)]
    return sorted(groups, key=lambda group: -mean(group.rewards) if group.rewards else float("inf"))


def labels(members: list[list[RunResult]]) -> list[str]:
    """What tells each group from the others: its overrides, else the settings that differ."""
    firsts = [group[0] for group in members]
    common = set.intersection(*(set(run.overrides) for run in firsts)) if firsts else set()
    names = [" ".join(item for item in run.overrides if item not in common) for run in firsts]
    configs = [run.config or {} for run in firsts]
    keys = sorted({key for config in configs for key in config})
    differing = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    texts = []
    for name, config in zip(names, configs, strict=True):
        values = [f"{key}={config.get(key)}" for key in differing[:3]]
        full = " ".join([name, *values]).strip() if names.count(name) > 1 else name
        texts.append(full or "(as composed)")
    return texts


def summarise(folders: Sequence[Path]) -> Table:
    """The runs of these folders compared, for rich to print."""
    return as_table(compare([result_of(RunFolder(folder)) for folder in folders]))


def as_table(groups: Sequence[RunGroup]) -> Table:
    """The comparison for a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "run" else "right", overflow="fold")
    for group in groups:
        table.add_row(*cells(group), style="" if group.rewards else "yellow")
    return table


def as_markdown(groups: Sequence[RunGroup]) -> str:
    """The comparison for a page, with the folders and errors below it."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(cells(group)) for group in groups]
    lines = [f"| {line} |" for line in lines]
    for group in groups:
        lines += ["", f"{group.label}:", ""]
        lines += [
            f"- {run.folder or 'no folder'}{f': {run.error}' if run.error else ''}"
            for run in group.runs
        ]
    return "\n".join(lines) + "\n"


def cells(group: RunGroup) -> list[str]:
    """One line of the table."""
    line = group.as_dict()
    low_high = f"{line['min']:.3f}..{line['max']:.3f}" if group.rewards else "-"
    reward = f"{line['reward']:.3f}" if group.rewards else "-"
    counts = [str(line["steps"]), f"{line['minutes']:.1f}", str(line["failed"] or "")]
    return [line["run"], str(line["seeds"]), reward, low_high, *counts]


class SweepSummary(Callback):
    """Hydra callback: prints what a --multirun found and writes it into the sweep's folder.

    It goes by the records of the jobs, so a sweep that dies half way still says what it had.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Be there at the end."""
        # Hydra skips on_multirun_end when a job has failed; that sweep needs its table most.
        atexit.register(self.on_multirun_end, config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Print the table and write it as summary.md and summary.json."""
        atexit.unregister(self.on_multirun_end)
        if (sweep := sweep_of_this_process()) is None:
            return  # refused before it began: Hydra 1.4 says so to every callback
        del os.environ[SWEEP_VARIABLE]
        folder = sweep.path
        runs = [
            RunResult(
                meaningful(job.overrides),
                RunFolder(Path(job.folder)) if job.folder and Path(job.folder).is_dir() else None,
                job.error,
            )
            for job in sweep.records().values()
        ]
        groups = compare(runs)
        (folder / "summary.md").write_text(as_markdown(groups))
        lines = [group.as_dict() for group in groups]
        (folder / "summary.json").write_text(json.dumps(lines, indent=1) + "\n")
        console = Console()
        console.print(as_table(groups))
        console.print(f"[dim]{folder}/summary.md[/]", soft_wrap=True, highlight=False)
