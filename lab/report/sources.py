"""Find and read the runs of a report: those of a sweep's folder, or run folders themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.report.run import Run, read_run
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import read_overrides
from rl.runtime.sweep_folder import SweepFolder


@dataclass(frozen=True)
class Sources:
    """Runs in the order in which they were started, and what their sweep records."""

    runs: list[Run]
    question: str  # of the first sweep that has one
    command: str  # that started the first sweep
    notes: list[str]  # what could not be read


def read_sources(paths: Sequence[Path], num_judged: int = 1) -> Sources:
    """Read the runs of sweep folders, run folders and folders of run folders, each run once."""
    runs: dict[Any, Run] = {}  # by folder
    notes: list[str] = []
    texts = {"question": "", "command": ""}
    for path in paths:
        sweep = SweepFolder(path)
        if sweep.jobs.is_dir():
            records = sweep.records()
            if num_broken := len(list(sweep.jobs.glob("*.json"))) - len(records):
                notes.append(f"{num_broken} files in {sweep.jobs} are no record of a job.")
            found = [(job.folder, job.overrides, job.error) for job in records.values()]
            texts = {key: text or sweep.read_info().get(key, "") for key, text in texts.items()}
        else:
            found = [(run.path, read_overrides(run), None) for run in _runs_at(path)]
            if not found:
                notes.append(f"{path} holds neither a sweep (jobs/) nor a run.")
        for place, overrides, error in found:
            folder = RunFolder(Path(place)) if place else None
            key = folder.path.resolve() if folder else len(runs)
            if key not in runs:
                runs[key] = read_run(folder, overrides, error, num_judged)
    return Sources(list(runs.values()), notes=notes, **texts)


def _runs_at(path: Path) -> list[RunFolder]:
    """Return the run in a folder, else the runs right inside it."""
    inside = sorted(path.iterdir()) if path.is_dir() else []
    found = [RunFolder(one.absolute()) for one in (path, *inside) if RunFolder(one).is_run]
    return found[:1] if RunFolder(path).is_run else found
