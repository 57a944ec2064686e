"""The files of steps that were done, lost for want of a checkpoint, and are about to be done again.

The ids in them will be given to other rollouts.
"""

from pathlib import Path

from rl.run.folder import RunFolder


def drop_steps_from(run_folder: RunFolder, step: int) -> None:
    """Move the rollouts of this step and later ones out of the way, and delete their tokens."""
    for path in _later(run_folder.rollouts, step):
        # Appended: a step may be lost more than once.
        dropped = run_folder.dropped_rollouts / path.name
        dropped.parent.mkdir(exist_ok=True)
        with dropped.open("ab") as file:
            file.write(path.read_bytes())
        path.unlink()
    for path in _later(run_folder.tokens, step):
        path.unlink()


def _later(folder: Path, step: int) -> list[Path]:
    """Files of this step and later ones; those that were never finished, too."""
    files = folder.glob("*step_*.*")
    return [p for p in files if int(p.name.partition("step_")[2].partition(".")[0]) >= step]
