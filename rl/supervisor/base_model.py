"""The model that a run starts from, which a resumed run must find unchanged, and its references."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

from rl.config.facts import needs_reference
from rl.config.rules import nodes
from rl.config.schema import ConfigError, Run, refused
from rl.model.folder import fingerprint
from rl.model.pretrained import local_folder
from rl.runtime.folder import RunFolder


def model_of(run_folder: RunFolder, prepare: Callable[[], Path]) -> Path:
    """Return the local folder of the model; a resumed run gets the model of its first start.

    A newer commit on the hub or a newer warm start would combine what was learned with another
    base model.

    Args:
        run_folder: of the run.
        prepare: builds, fetches or finds the model.

    Raises:
        ConfigError: there is no such model, or its content has changed since the run started.

    """
    is_resumed = bool(run_folder.complete_checkpoints())
    is_there = is_resumed and run_folder.model().is_dir()
    model = run_folder.model() if is_there else prepare()
    expected = run_folder.model_fingerprint() if is_resumed else ""
    if expected and fingerprint(model) != expected:
        raise ConfigError(
            [
                f"{run_folder} started from {run_folder.model()}, and {model} holds something else "
                "now: what was learned fits only the old model. Restore it, or start a new run"
            ]
        )
    return model


def make_cache(folder: Path) -> None:
    """Make the folder that will keep a result; ConfigError if it cannot be written."""
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


def fetch_references(run: Run) -> None:
    """Download every reference model that lies on the hub; ConfigError if that fails."""
    if needs_reference(run.plain()):
        with refused():
            for _, node in nodes(run.reference):
                if node.get("path") and "revision" in node:
                    local_folder(node["path"], node["revision"], "reference")
