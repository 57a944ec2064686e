"""The files of steps that were done, lost for want of a checkpoint, and are about to be done again.

The ids in them will be given to other rollouts.
"""

from pathlib import Path

from rl.run.folder import RunFolder, step_of


def drop_steps_from(run_folder: RunFolder, step: int) -> None:
    """Move the rollouts of this step and later ones out of the way, delete tokens, evaluations."""
    for path in _later(run_folder.rollouts, step):
        # Appended: a step may be lost more than once.
        dropped = run_folder.dropped_rollouts / path.name
        dropped.parent.mkdir(exist_ok=True)
        with dropped.open("ab") as file:
            file.write(path.read_bytes())
        path.unlink()
    # A version is evaluated beside the step that trains it, so that is done again, too. One that is
    # not (the run ends earlier this time) would be taken for what the run came to.
    for path in [*_later(run_folder.tokens, step), *_later(run_folder.evaluations, step)]:
        path.unlink()


def _later(folder: Path, step: int) -> list[Path]:
    """Files of this step and later ones; those that were never finished, too."""
    patterns = ("step", ".step", "version", ".version")
    numbered = [path for pattern in patterns for path in folder.glob(f"{pattern}_[0-9]*")]
    return [path for path in numbered if step_of(path) >= step]
