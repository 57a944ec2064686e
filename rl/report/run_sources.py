"""The runs that a report is about: those of a sweep's folder, or run folders themselves."""

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.report.finished_runs import RunResult, meaningful, result_of
from rl.run.folder import RunFolder
from rl.run.sweep_folder import SweepFolder


@dataclass(frozen=True)
class RunSources:
    """Runs in the order in which they were started, and what was noted of them."""

    runs: list[RunResult] = field(default_factory=list)
    question: str = ""  # of the first sweep that has one
    command: str = ""  # that started it
    notes: list[str] = field(default_factory=list)  # what could not be read


def read_sources(paths: Sequence[Path]) -> RunSources:
    """The runs of sweep folders, run folders and folders of run folders; none of them twice."""
    runs: list[RunResult] = []
    notes: list[str] = []
    sweeps: list[dict[str, Any]] = []
    for path in paths:
        if SweepFolder(path).jobs.is_dir():
            runs += _jobs(path, notes)
            sweeps.append(SweepFolder(path).read_info())
        elif is_run(path):
            runs.append(result_of(RunFolder(path.absolute())))
        elif inside := [child for child in _children(path) if is_run(child)]:
            runs += [result_of(RunFolder(child.absolute())) for child in inside]
        elif path.is_dir():
            notes.append(f"{path} holds neither a sweep (jobs/) nor a run (metrics.jsonl).")
        else:
            notes.append(f"{path} does not exist.")
    return RunSources(
        list(_once(runs)),
        next((str(sweep["question"]) for sweep in sweeps if sweep.get("question")), ""),
        next((_as_typed(sweep["command"]) for sweep in sweeps if sweep.get("command")), ""),
        notes,
    )


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, however far it got."""
    return (path / "metrics.jsonl").is_file() or (path / "overrides.yaml").is_file()


def _children(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []


def _jobs(sweep: Path, notes: list[str]) -> Iterator[RunResult]:
    for path in sorted(SweepFolder(sweep).jobs.glob("*.json")):
        job = _json(path)
        if not isinstance(job.get("overrides"), list):
            notes.append(f"{path} is no record of a job: it is left out.")
            continue
        folder = RunFolder(Path(str(job["folder"]))) if job.get("folder") else None
        yield RunResult(meaningful([str(o) for o in job["overrides"]]), folder, job.get("error"))


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def _as_typed(command: str) -> str:
    """A sweep's command without the folder by which it would go on with what is there."""
    try:
        parts = shlex.split(str(command))
    except ValueError:  # a quotation without an end
        return str(command)
    return shlex.join(part for part in parts if not part.startswith("hydra.sweep.dir="))


def _once(runs: Sequence[RunResult]) -> Iterator[RunResult]:
    seen = set()
    for run in runs:
        key = run.folder.path.resolve() if run.folder else None
        if key is None or key not in seen:
            seen.add(key)
            yield run
