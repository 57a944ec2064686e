"""Find and read the runs of a report: those of a sweep's folder, or run folders themselves."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.report.run import Run, read_run
from lab.runs import runs_at
from rl.runtime.sweep_folder import SweepFolder


@dataclass(frozen=True)
class Sources:
    """Runs in the order in which they were started, and what their sweep records."""

    runs: list[Run] = field(default_factory=list)
    question: str = ""  # of the first sweep that has one
    command: str = ""  # that started the first sweep
    notes: list[str] = field(default_factory=list)  # what could not be read


def read_sources(paths: Sequence[Path], num_judged: int = 1) -> Sources:
    """Read the runs of sweep folders, run folders and folders of run folders, each run once."""
    runs: dict[Any, Run] = {}  # by folder
    notes: list[str] = []
    sweeps: list[dict[str, Any]] = []
    for path in paths:
        sweep, found = SweepFolder(path), runs_at(path)
        if sweep.jobs.is_dir():
            sweeps.append(sweep.read_info())
            broken = len(list(sweep.jobs.glob("*.json"))) - len(found)
            notes += [f"{broken} records in {sweep.jobs} cannot be read."] if broken else []
        elif not found:
            what = "holds neither a sweep (jobs/) nor a run" if path.is_dir() else "does not exist"
            notes.append(f"{path} {what}.")
        for run in found:
            key = run.folder.path.resolve() if run.folder else len(runs)
            if key not in runs:
                runs[key] = read_run(run.folder, run.overrides, run.error, num_judged)
    return Sources(
        list(runs.values()),
        next((str(sweep["question"]) for sweep in sweeps if sweep.get("question")), ""),
        next((_without_dir(sweep["command"]) for sweep in sweeps if sweep.get("command")), ""),
        notes,
    )


def _without_dir(command: str) -> str:
    """Return a sweep's command without its folder, so that it starts a new sweep."""
    try:
        words = shlex.split(str(command))
    except ValueError:  # an open quotation
        return str(command)
    return shlex.join(word for word in words if not word.startswith("hydra.sweep.dir="))
