"""Functions that inspect a model folder in Hugging Face format without loading the weights."""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")
# An architecture with such a name does not predict the next token, so it cannot be the policy.
_OTHER_HEADS = (
    *("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForSpeechSeq2Seq", "ForImageClassification"),
)


def weight_files(folder: Path) -> Iterator[Path]:
    """Return the paths of the safetensors files in a model folder."""
    return folder.glob("*.safetensors")


def holds_weights(folder: Path) -> bool:
    """Return whether the folder contains weights. The folder of a tiny model has only a config."""
    return any(weight_files(folder))


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return (tensor name -> header entry, offset of the tensors) of a safetensors file."""
    with path.open("rb") as file:
        # The format: length of the header in 8 bytes, the header as JSON, the tensors.
        (length,) = struct.unpack("<Q", file.read(8))
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path} is truncated: download it again")
        header = json.loads(file.read(length))
    forms = {name: form for name, form in header.items() if name != "__metadata__"}
    return forms, 8 + length


def listed_files(folder: Path) -> set[str] | None:
    """Return the names of weight files that the index lists, or None if the folder has no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def missing_weights(folder: Path) -> str | None:
    """Return the name of a missing weight file, or None if no file is missing."""
    if (listed := listed_files(folder)) is not None:
        return next((name for name in sorted(listed) if not (folder / name).is_file()), None)
    return None if holds_weights(folder) else "*.safetensors"


def damaged_weights(folder: Path) -> str | None:
    """Return the name of a weight file that is truncated or invalid, or None if all seem valid."""
    for path in sorted(weight_files(folder)):
        try:
            forms, begin = header_of(path)
            end = max((form["data_offsets"][1] for form in forms.values()), default=0)
            is_whole = path.stat().st_size == begin + end
        except (struct.error, ValueError, AttributeError, LookupError, TypeError):
            is_whole = False
        if not is_whole:
            return path.name
    return None


def fingerprint(folder: Path) -> str:
    """Return a hash of the model's weights, config and tokenizer, which a resume compares."""
    total = xxhash.xxh3_128()
    names = [path.name for path in weight_files(folder)]
    for name in sorted([*names, "config.json", "tokenizer.json"]):
        path = folder / name
        if path.is_file():
            total.update(f"{name}:{_content_hash(path)};".encode())
    return total.hexdigest()


def _content_hash(path: Path) -> str:
    """Return a hash of a file. The file may be larger than the memory, so read it in pieces."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config of a model folder to another folder.

    A link to a file outside the model folder is not copied. The file could be private, and users
    publish checkpoints.
    """
    for path in source.iterdir():
        of_weights = path.name == "config.json" or path.name.endswith(".index.json")
        copied = path.suffix in _TOKENIZER_FILES and not of_weights
        if copied and not links_outside(path) and not (folder / path.name).exists():
            shutil.copy2(path, folder)


def links_outside(path: Path) -> bool:
    """Return whether a path is a link to a file outside its folder (or outside the hub's cache)."""
    target, home = path.resolve(), path.parent.resolve()
    in_cache = home.parent.name == "snapshots" and home.parents[1].name.startswith("models--")
    homes = [home, home.parents[1] / "blobs"] if in_cache else [home]
    return not any(target.is_relative_to(home) for home in homes)


def check_turn_limit(max_tokens: int, max_seq_len: int) -> None:
    """Raise ValueError unless max_tokens, the limit of a turn, is less than max_seq_len."""
    if not 1 <= max_tokens < max_seq_len:
        raise ValueError(
            f"model.max_tokens={max_tokens}: set it to at least 1 and below model.max_seq_len="
            f"{max_seq_len}, which also counts the prompt"
        )


def linear_layers(model: Path) -> list[str]:
    """Return the module names of the model's linear layers, without embedding, head and experts.

    The router of experts is left out, too, because transformers does not make it a linear layer.
    """
    tensors = [
        tensor.removesuffix(".weight").split(".")
        for path in weight_files(model)
        for tensor, form in header_of(path)[0].items()
        if tensor.endswith(".weight") and len(form["shape"]) == 2
    ]
    of_experts = {path[-1] for path in tensors if "experts" in path}
    left_out = of_experts | {"lm_head"} | ({"gate", "router"} if of_experts else set())
    names = {path[-1] for path in tensors} - left_out
    return sorted(name for name in names if "embed" not in name)


def check_trainable(folder: Path) -> None:
    """Raise ValueError if the model is not a causal language model or its weights are quantised."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    wrong = [kind for kind in kinds if kind.endswith(_OTHER_HEADS)]
    if config.get("is_encoder_decoder") or wrong:
        kind = ", ".join(wrong or kinds) or config.get("model_type")
        raise ValueError(
            f"{folder} contains a {kind}, which is not a causal language model: choose a model "
            "whose config.json has an architecture ...ForCausalLM"
        )
    if quantised := config.get("quantization_config"):
        how = quantised.get("quant_method", "somehow")
        raise ValueError(
            f"{folder} contains quantised weights ({how}), which cannot be trained: choose the "
            "bfloat16 model that was quantised"
        )
