"""Inspect a model folder in Hugging Face format without loading the weights."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash
from safetensors import safe_open

_TOKENIZER_FILES = (".json", ".jinja", ".txt", ".model")
_HASHED = (
    *("config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "generation_config.json"),
)
# Architectures with these suffixes are not causal language models.
_OTHER_HEADS = (
    *("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForSpeechSeq2Seq", "ForImageClassification"),
)
OTHER_TOKENIZER = (
    "has another tokenizer than the policy, so it cannot score the policy's tokens: choose a "
    "teacher of the policy's model family, or train on the teacher's text with loss=sft "
    "sampler=transcripts"
)


def weight_files(folder: Path) -> Iterator[Path]:
    return folder.glob("*.safetensors")


def holds_weights(folder: Path) -> bool:
    """Return whether the folder contains weights. The folder of a new tiny model has none."""
    return any(weight_files(folder))


def shapes_of(path: Path) -> dict[str, list[int]]:
    """Return each tensor's shape. Raise SafetensorError if the file is truncated or invalid."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def files_in_index(folder: Path) -> set[str] | None:
    """Return the names of weight files that the index lists, or None if the folder has no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    files = json_of(index).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index} has no weight_map: download it again")
    return set(files.values())


def missing_weight_file(folder: Path) -> str | None:
    if (listed := files_in_index(folder)) is not None:
        return next((name for name in sorted(listed) if not (folder / name).is_file()), None)
    return None if holds_weights(folder) else "*.safetensors"


def fingerprint(folder: Path) -> str:
    """Return a hash of weights, config, tokenizer and chat template. A resume compares the hash."""
    total = xxhash.xxh3_128()
    for name in sorted([*(path.name for path in weight_files(folder)), *_HASHED]):
        path = folder / name
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            total.update(f"{name}:{digest};".encode())
    return total.hexdigest()


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config, except links out of `source`."""
    for path in source.iterdir():
        of_weights = path.name == "config.json" or path.name.endswith(".index.json")
        copied = path.suffix in _TOKENIZER_FILES and not of_weights
        # Skip files outside `source`, because they may be private and users publish checkpoints.
        if copied and not links_outside(path) and not (folder / path.name).exists():
            shutil.copy2(path, folder)


def links_outside(path: Path) -> bool:
    """Return whether a path links out of its folder. The hub cache's blobs/ counts as inside."""
    target, home = path.resolve(), path.parent.resolve()
    in_cache = home.parent.name == "snapshots" and home.parents[1].name.startswith("models--")
    homes = [home, home.parents[1] / "blobs"] if in_cache else [home]
    return not any(target.is_relative_to(home) for home in homes)


def linear_layers(model: Path) -> list[str]:
    """Return names of linear layers, e.g. q_proj, without embedding, head, experts and router."""
    tensors = [
        tensor.removesuffix(".weight").split(".")
        for path in weight_files(model)
        for tensor, shape in shapes_of(path).items()
        if tensor.endswith(".weight") and len(shape) == 2
    ]
    of_experts = {path[-1] for path in tensors if "experts" in path}
    left_out = of_experts | {"lm_head"} | ({"gate", "router"} if of_experts else set())
    names = {path[-1] for path in tensors} - left_out
    return sorted(name for name in names if "embed" not in name)


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError if the file contains none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains no JSON object: download it again")
    return content


def check_trainable(folder: Path) -> None:
    """Raise ValueError if the model is not causal, is quantised, or lacks some token embeddings."""
    config = json_of(folder / "config.json")
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    wrong = [kind for kind in kinds if kind.endswith(_OTHER_HEADS)]
    if config.get("is_encoder_decoder") or wrong:
        kind = ", ".join(wrong or kinds) or config.get("model_type")
        raise ValueError(
            f"{folder} contains a {kind}, which is not a causal language model: choose a model "
            "whose config.json has an architecture ...ForCausalLM"
        )
    if quantised := config.get("quantization_config"):
        how = quantised.get("quant_method", "unknown method")
        raise ValueError(
            f"{folder} contains quantised weights ({how}), which cannot be trained: choose the "
            "original bfloat16 model"
        )
    size = vocabulary_of(folder)
    if size and (tokens := _tokens_with_ids_from(folder, size)):
        raise ValueError(
            f"{folder} has the vocab_size {size}, but its tokenizer has tokens with ids from "
            f"{size} on ({', '.join(map(repr, tokens[:3]))}): use the tokenizer of this model, or "
            "resize its embeddings"
        )


def vocabulary_of(folder: Path) -> int | None:
    """Return the model's number of logits (vocab_size), or None if config.json has none."""
    config = json_of(folder / "config.json")
    size = {**config, **(config.get("text_config") or {})}.get("vocab_size")
    return size if isinstance(size, int) else None


def _tokens_with_ids_from(folder: Path, first: int) -> list[str]:
    """Return the tokens that the tokenizer in `folder` may produce and whose ids are >= `first`.

    Leave out special tokens that the chat template does not use, because a model may lack their
    embeddings. Gemma 3's text models, for example, lack those of image tokens.
    """
    paths = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    tokenizer, config = (json_of(path) if path.is_file() else {} for path in paths)
    vocab = tokenizer.get("model", {}).get("vocab") or {}
    ids = dict(vocab) if isinstance(vocab, dict) else {t[0]: i for i, t in enumerate(vocab)}
    template = folder / "chat_template.jinja"
    used = template.read_text(encoding="utf-8") if template.is_file() else ""
    used += str(config.get("chat_template"))
    for token in tokenizer.get("added_tokens", ()):
        ids[token["content"]] = token["id"]
        if token.get("special") and token["content"] not in used:
            del ids[token["content"]]
    return [text for text, id in ids.items() if id >= first]


def _tokens_and_merges(folder: Path) -> tuple[Any, list[str], dict[str, int]]:
    tokenizer = json_of(folder / "tokenizer.json")
    model = tokenizer.get("model", {})
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges") or ()]
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return model.get("vocab"), merges, added


def check_teacher(teacher: Path, policy: Path) -> None:
    """Raise ValueError if a reference model cannot score every token of the policy."""
    theirs, ours = (_tokens_and_merges(folder) for folder in (teacher, policy))
    if theirs != ours:
        raise ValueError(f"reference.path={teacher} {OTHER_TOKENIZER}")
    # A teacher may lack logits of ids without a token, because the policy rarely samples these ids.
    size = vocabulary_of(teacher)
    if size and (missing := _tokens_with_ids_from(policy, size)):
        raise ValueError(
            f"reference.path={teacher} has {size} logits, so it cannot score {len(missing)} tokens "
            f"of the policy, such as {missing[0]!r}: choose a teacher with a larger vocab_size"
        )
