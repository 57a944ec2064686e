"""A causal language model in Hugging Face format: a local folder, or a name on the hub.

`prepare` downloads a model from the hub into huggingface_hub's cache and checks the model's files.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from envs.loading import hub_problem
from rl.config.annotations import Node
from rl.config.positions import ADAPTER, merge_advice, positions_of
from rl.model.folder import json_of, links_outside, missing_weight_file, shapes_of, weight_files

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
IGNORE = ["*/*"]  # do not download subfolders, which repeat the weights in other formats


@dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """The options of conf/model/hf.yaml."""

    path: str
    revision: str | None
    renderer: str
    renderer_options: Mapping[str, Any] | None = None
    dtype: Literal["bfloat16", "float32"]
    head_dtype: Literal["float32"] | None
    max_seq_len: int
    max_tokens: int
    learning_rate: float
    describe_tools: bool
    warm_start: Node | None

    def prepare(self, folder: Path) -> Path:  # noqa: ARG002 only TinyModel writes to it
        local = local_folder(self.path, self.revision, "model")
        check_length(local, self.max_seq_len, "model")
        return local


def check_length(local: Path, max_seq_len: int, group: str) -> None:
    """Raise ValueError if the model in `local` has fewer than `max_seq_len` positions."""
    if (longest := positions_of(local)) and max_seq_len > longest:
        raise ValueError(
            f"{group}.max_seq_len={max_seq_len}, but {local} was built for {longest} positions: "
            f"use {group}.max_seq_len={longest} or less"
        )


def local_folder(path: str, revision: str | None, group: str, *, config_only: bool = False) -> Path:
    """Return the folder of the model `path`. Download the model if `path` is its hub name.

    Raise ValueError if the model is missing or damaged. `group`: config group named in messages.
    """
    local = Path(path).expanduser()
    is_hub_name = HUB_NAME.fullmatch(path) and path[0] not in ".~"
    if not local.exists() and is_hub_name:
        local = _download(path, revision, group, ["config.json"] if config_only else ALLOW)
    if not local.is_dir():
        raise ValueError(
            f"{group}.path={path} does not exist: set {group}.path to a folder with config.json, "
            "tokenizer.json and *.safetensors, or to a name on the hub (organisation/model)"
        )
    if not (local / "config.json").is_file():
        if (export := local / "hf").is_dir():
            raise ValueError(f"{path} is a checkpoint: set {group}.path={export}, the model in it")
        if (local / ADAPTER).is_file():
            raise ValueError(merge_advice(local.absolute(), f"{group}.path"))
    if not config_only:
        check_files(local)
    return local.absolute()


def _download(path: str, revision: str | None, group: str, patterns: list[str]) -> Path:
    name = path if revision is None else f"{path} at revision {revision}"
    out_of_reach = hub_problem()
    try:
        snapshot = snapshot_download(
            path,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=IGNORE,
            local_files_only=out_of_reach is not None,
        )
    except GatedRepoError as error:
        raise ValueError(
            f"{name} is a gated model: accept its terms on huggingface.co, then export HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"the hub has no model {name}, and there is no such folder: correct {group}.path or "
            f"{group}.revision, or export HF_TOKEN if the model is private"
        ) from error
    except OSError as error:  # the hub is unreachable, or the disk is full
        reason = out_of_reach or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise ValueError(
            f"cannot get {name} from the hub ({reason}): set {group}.path=<local folder>, set "
            "HF_HOME to a cache that contains the model, set HF_ENDPOINT to a mirror, or run once "
            "with a network and without HF_HUB_OFFLINE"
        ) from error
    return Path(str(snapshot))


def check_files(folder: Path) -> None:
    """Raise ValueError if a file is missing or damaged, or a JSON file links out of `folder`."""
    for name, saved in (("config.json", "model"), ("tokenizer.json", "fast tokenizer")):
        if not (folder / name).is_file():
            how = f"save the {saved} there with save_pretrained(folder)"
            raise ValueError(f"{folder} contains no {name}: {how}")
        if links_outside(folder / name):
            raise ValueError(
                f"{folder}/{name} is a link to {(folder / name).resolve()}, outside its folder: "
                "replace the link by a copy if this file may be published with checkpoints"
            )
        json_of(folder / name)
    if missing := missing_weight_file(folder):
        raise ValueError(
            f"{folder} contains no {missing}: finish the download, or save the weights as "
            "safetensors with save_pretrained(folder)"
        )
    for path in sorted(weight_files(folder)):
        try:
            shapes_of(path)
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file: download it again"
            ) from error
