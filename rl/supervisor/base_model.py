"""The model that a run starts from: prepared once, and the same one whenever the run goes on.

And the models that it reads besides.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rl.config.facts import needs_reference
from rl.config.schema import ConfigError, refused
from rl.model.folder import fingerprint
from rl.model.pretrained import local_folder
from rl.run.folder import RunFolder


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


def make_cache(folder: Path) -> None:
    """Make a folder for what is to be kept, before the work that goes into it is done.

    Raises:
        ConfigError: nothing can be kept there.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            [
                f"warm starts are kept in {folder}, which cannot be written ({error.strerror}): "
                "set the environment variable OFFBYONE_CACHE to a folder that can"
            ]
        ) from error


def fetch_references(config: Mapping[str, Any]) -> None:
    """Have every reference that lies on the hub in the cache, before anything is started.

    Raises:
        ConfigError: there is no such model, or it cannot be had.

    """
    if needs_reference(config):
        with refused():
            for node in _on_a_path(config["reference"]):
                local_folder(node["path"], node["revision"], "reference")


def _on_a_path(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every node in a value, itself included, that names a model as conf/model/hf.yaml does."""
    if isinstance(value, Mapping):
        if value.get("path") and "revision" in value:
            yield value
        for item in value.values():
            yield from _on_a_path(item)
    elif isinstance(value, list):
        for item in value:
            yield from _on_a_path(item)
