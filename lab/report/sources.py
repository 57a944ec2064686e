"""Find and read the runs of a report: those of a sweep's folder, or run folders themselves."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.report.run import Run, read_run
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import read_overrides
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
        found: Iterator[tuple[RunFolder | None, Sequence[str], str | None]]
        if SweepFolder(path).jobs.is_dir():
            found = _jobs(path, notes)
            sweeps.append(SweepFolder(path).read_info())
        else:
            found = ((run, read_overrides(run), None) for run in _runs_at(path, notes))
        for folder, overrides, error in found:
            key = folder.path.resolve() if folder else len(runs)
            if key not in runs:
                runs[key] = read_run(folder, overrides, error, num_judged)
    return Sources(
        list(runs.values()),
        next((str(sweep["question"]) for sweep in sweeps if sweep.get("question")), ""),
        next((_without_dir(sweep["command"]) for sweep in sweeps if sweep.get("command")), ""),
        notes,
    )


def _runs_at(path: Path, notes: list[str]) -> list[RunFolder]:
    """Return the run in a folder, else the runs right inside it."""
    if RunFolder(path).is_run:
        return [RunFolder(path.absolute())]
    children = sorted(path.iterdir()) if path.is_dir() else []
    if runs := [RunFolder(c.absolute()) for c in children if c.is_dir() and RunFolder(c).is_run]:
        return runs
    what = "holds neither a sweep (jobs/) nor a run" if path.is_dir() else "does not exist"
    notes.append(f"{path} {what}.")
    return []


def _jobs(sweep: Path, notes: list[str]) -> Iterator[tuple[RunFolder | None, list[str], Any]]:
    """Yield folder, overrides and error of each job."""
    for path in sorted(SweepFolder(sweep).jobs.glob("*.json")):
        job: Any = None
        with suppress(OSError, ValueError):
            job = json.loads(path.read_text())
        if not isinstance(job, dict) or not isinstance(job.get("overrides"), list):
            notes.append(f"{path} is no record of a job: it is left out.")
            continue
        folder = RunFolder(Path(str(job["folder"]))) if job.get("folder") else None
        yield folder, [str(override) for override in job["overrides"]], job.get("error")


def _without_dir(command: str) -> str:
    """Return a sweep's command without its folder, so that it starts a new sweep."""
    try:
        words = shlex.split(str(command))
    except ValueError:  # an open quotation
        return str(command)
    return shlex.join(word for word in words if not word.startswith("hydra.sweep.dir="))
