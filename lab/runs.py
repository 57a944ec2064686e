"""Find the runs in a folder, and split a command line into folders and options."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.runtime.folder import RunFolder
from rl.runtime.start_record import read_overrides
from rl.runtime.sweep_folder import JobRecord, SweepFolder


@dataclass(frozen=True)
class FoundRun:
    folder: RunFolder | None  # None for a sweep's job before its first start
    overrides: list[str]
    error: str | None = None  # why a sweep's job has no result, None after success
    grown: int = 0  # index of the command that added the job, 0 for the sweep's first


def runs_at(path: Path) -> list[FoundRun]:
    """Return the jobs if `path` is a sweep, the run if `path` is a run, else the runs in `path`."""
    sweep = SweepFolder(path)
    if sweep.jobs.is_dir():
        return [
            FoundRun(
                folder=_folder_of(job, path) if job.folder else None,
                overrides=list(map(str, job.overrides)),
                error=None if job.error is None else str(job.error),
                grown=job.grown if isinstance(job.grown, int) else 0,
            )
            for job in sweep.records().values()
            if isinstance(job.overrides, list)
        ]
    below = sorted(path.iterdir()) if path.is_dir() else []
    folders = [path] if RunFolder(path).is_run else [p for p in below if RunFolder(p).is_run]
    runs = [RunFolder(folder.absolute()) for folder in folders]
    return [FoundRun(run, read_overrides(run)) for run in runs]


def _folder_of(job: JobRecord, sweep: Path) -> RunFolder:
    """Return a job's run folder. If it was moved together with the sweep, search near the sweep."""
    path = Path(str(job.folder))
    above = [*sweep.absolute().parents][:3]
    moved = (Path(a, *path.parts[-n:]) for a in above for n in (1, 2))
    return RunFolder(next(filter(os.path.isdir, (path, *moved)), path))


def folders_and_options(
    words: Sequence[str], keys: Collection[str]
) -> tuple[list[Path], dict[str, str]]:
    """Return the folders and the options key=value. Raise ValueError if a key is unknown."""
    folders, options = [], {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or Path(word).exists():  # the name of a folder may contain "="
            folders.append(Path(word))
        elif key in keys:
            options[key] = value
        else:
            raise ValueError(f"{word}: the key {key} does not exist; choose from {', '.join(keys)}")
    return folders, options
