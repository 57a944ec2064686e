"""The runs in a folder: the folder of one run, a sweep, or a folder of runs."""

from collections.abc import Sequence
from pathlib import Path

from rl.runtime.folder import RunFolder
from rl.runtime.sweep_folder import SweepFolder


class NoRun(Exception):
    """A folder on the command line is not a run; the message is for the user."""


def runs_in(folder: Path) -> list[Path]:
    """Return the runs directly below a folder, the latest first."""
    if not folder.is_dir():
        return []
    runs = [path for path in folder.iterdir() if RunFolder(path).is_run]
    return sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)


def runs_of(folders: Sequence[Path]) -> dict[str, RunFolder]:
    """Return the runs of all folders, under unique names.

    Raises:
        NoRun: a folder is missing, or it is not a run and holds none.

    """
    paths = list(dict.fromkeys(path for folder in folders for path in _expanded(folder)))
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, map(RunFolder, paths), strict=True))


def _expanded(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NoRun(f"{folder}: there is no such folder{_near(folder)}")
    folder = folder.resolve()
    if RunFolder(folder).is_run:
        return [folder]
    runs = _jobs(folder) or sorted(runs_in(folder))
    if not runs:
        what = "an empty folder" if not any(folder.iterdir()) else "not the folder of a run"
        raise NoRun(f"{folder} is {what}: a run has config.yaml and rollouts/ in it{_near(folder)}")
    return runs


def _jobs(sweep: Path) -> list[Path]:
    """Return the runs of a sweep's folder, in the order of its jobs."""
    jobs = [job for _, job in sorted(SweepFolder(sweep).records().items()) if job.folder]
    folders = [Path(str(job.folder)) for job in jobs]
    return [folder.resolve() for folder in folders if RunFolder(folder).is_run]


def _near(folder: Path) -> str:
    """Return a hint that names runs beside the folder, or in outputs/."""
    runs = runs_in(folder.parent if folder.parent.is_dir() else Path("outputs"))
    return f"; {runs[0].parent} holds {', '.join(run.name for run in runs[:5])}" if runs else ""
