"""What is in a folder with a model in Hugging Face form, found without loading any of it."""

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")


def weight_files(folder: Path) -> Iterator[Path]:
    """Return the files with weights."""
    return folder.glob("*.safetensors")


def holds_weights(folder: Path) -> bool:
    """True unless the model in the folder is but a config, to be initialised."""
    return any(weight_files(folder))


def missing_weights(folder: Path) -> str | None:
    """Return the name of a file with weights that should be in the folder and is not."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return next((name for name in sorted(shards) if not (folder / name).is_file()), None)
    return None if holds_weights(folder) else "*.safetensors"


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what goes with the model in `source` and is neither its weights nor their index."""
    for path in source.iterdir():
        of_weights = path.name == "config.json" or path.name.endswith(".index.json")
        wanted = path.suffix in _TOKENIZER_FILES and not of_weights
        if wanted and not (folder / path.name).exists():
            shutil.copy2(path, folder)


def linear_layers(model: Path) -> list[str]:
    """Return the last names of a model folder's matrices, embedding and head excepted."""
    names: set[str] = set()
    for path in weight_files(model):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        names |= {
            tensor.split(".")[-2]
            for tensor, form in header.items()
            if tensor.endswith(".weight") and len(form["shape"]) == 2
        }
    return sorted(name for name in names if "embed" not in name and name != "lm_head")
