"""Which runs a folder is, or holds: one run, a sweep, or a folder of runs."""

from collections.abc import Sequence
from pathlib import Path

from rl.run.folder import RunFolder
from rl.run.sweep_folder import SweepFolder


class NoRun(Exception):
    """A folder that was named is none of a run; the message is for the user."""


def is_run(folder: Path) -> bool:
    """Whether a run has written there."""
    run = RunFolder(folder)
    return any(p.exists() for p in (run.config, run.rollouts, run.evaluations, run.evaluated))


def runs_in(folder: Path) -> list[Path]:
    """The runs right below a folder, the latest first."""
    if not folder.is_dir():
        return []
    runs = [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    return sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)


def runs_of(folders: Sequence[Path]) -> dict[str, RunFolder]:
    """Return the runs of all folders, by names that tell them apart.

    Raises:
        NoRun: a folder is missing, or neither a run nor holds one.

    """
    paths: list[Path] = []
    for folder in folders:
        paths += [path for path in _expanded(folder) if path not in paths]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, map(RunFolder, paths), strict=True))


def _expanded(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NoRun(f"{folder}: there is no such folder{_near(folder)}")
    folder = folder.resolve()
    if is_run(folder):
        return [folder]
    runs = _jobs(folder) or sorted(runs_in(folder))
    if not runs:
        what = "an empty folder" if not any(folder.iterdir()) else "no folder of a run"
        raise NoRun(f"{folder} is {what}: a run has config.yaml and rollouts/ in it{_near(folder)}")
    return runs


def _jobs(sweep: Path) -> list[Path]:
    """The runs of a sweep's folder, in the order of its jobs."""
    runs = []
    for _, job in sorted(SweepFolder(sweep).records().items()):
        if job.folder and is_run(Path(job.folder)):
            runs.append(Path(job.folder).resolve())
    return runs


def _near(folder: Path) -> str:
    """Where runs are, if they are where they usually lie."""
    runs = runs_in(folder.parent if folder.parent.is_dir() else Path("outputs"))
    return f"; {runs[0].parent} holds {', '.join(run.name for run in runs[:5])}" if runs else ""
