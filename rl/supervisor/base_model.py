"""The model that a run starts from: prepared once, and the same one whenever the run goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rl.config.schema import ConfigError
from rl.model.folder import fingerprint
from rl.run.folder import RunFolder


@contextmanager
def refused() -> Iterator[None]:
    """What cannot be read, found or written in the block is a mistake in the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError([str(error)]) from error


def model_of(run_folder: RunFolder, prepare: Callable[[], Path]) -> Path:
    """Return the local folder of the model; that of the first start where a run goes on.

    A newer commit on the hub or a newer warm start would put what was learned on another base.

    Args:
        run_folder: of the run.
        prepare: builds, fetches or finds the model.

    Raises:
        ConfigError: there is no such model, or no longer the one that the run started from.

    """
    goes_on = bool(run_folder.complete_checkpoints())
    stays = goes_on and run_folder.model().is_dir()
    model = run_folder.model() if stays else prepare()
    expected = run_folder.model_fingerprint() if goes_on else ""
    if expected and fingerprint(model) != expected:
        raise ConfigError(
            [
                f"{run_folder} started from {run_folder.model()}, and {model} holds something else "
                "now: what was learned fits the old one alone. Bring that back, or start a new run"
            ]
        )
    return model
