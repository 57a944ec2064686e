"""What is in a folder with a model in Hugging Face form, found without loading any of it."""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

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


def damaged_weights(folder: Path) -> str | None:
    """Return the name of a file with weights that is cut off or no safetensors at all."""
    for path in sorted(weight_files(folder)):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length < size else {}
            ends = [form["data_offsets"][1] for key, form in header.items() if key[:2] != "__"]
            # A length of 8 bytes, the header, then the tensors, at offsets from the header's end.
            is_whole = size == 8 + length + max(ends, default=0)
        except (struct.error, ValueError, AttributeError, LookupError, TypeError):
            is_whole = False
        if not is_whole:
            return path.name
    return None


def fingerprint(folder: Path) -> str:
    """Return what tells a model from any other: a hash over weights, config and tokenizer."""
    total = xxhash.xxh3_128()
    names = [path.name for path in weight_files(folder)]
    for name in sorted([*names, "config.json", "tokenizer.json"]):
        path = folder / name
        if path.is_file():
            total.update(f"{name}:{_content(path)};".encode())
    return total.hexdigest()


def _content(path: Path) -> str:
    """Return a hash of a file, read piece by piece: it may be larger than the memory."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what goes with the model in `source` and is neither its weights nor their index.

    What is but a link out of the folder is left out: it could be any file of this machine, and a
    checkpoint is made to be given away.
    """
    for path in source.iterdir():
        of_weights = path.name == "config.json" or path.name.endswith(".index.json")
        copied = path.suffix in _TOKENIZER_FILES and not of_weights
        if copied and not leads_out(path) and not (folder / path.name).exists():
            shutil.copy2(path, folder)


def leads_out(path: Path) -> bool:
    """True for a link out of its folder, but for those that the hub's cache is made of."""
    target, home = path.resolve(), path.parent.resolve()
    in_cache = home.parent.name == "snapshots" and home.parents[1].name.startswith("models--")
    homes = [home, home.parents[1] / "blobs"] if in_cache else [home]
    return not any(target.is_relative_to(home) for home in homes)


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
