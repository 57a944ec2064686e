"""How the weights of a run travel to vLLM, decided once for all parts."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.model_folder import weight_files

Strategy = Literal["shm", "adapter"]
Node = Mapping[str, Any]

# What requests name as their model: vLLM holds the base and the adapter under different names.
SERVED_AS: dict[Strategy, str] = {"shm": "policy", "adapter": "policy-adapter"}

LORA = "rl.adapter.LoRA"
TINY = "rl.tiny.TinyModel"
# The room vLLM can keep for an adapter.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def strategy(sync: Node, adapter: Node, model: Node) -> Strategy:
    """Return the strategy `sync` asks for, or for `auto` the smallest push that is exact."""
    wanted = sync["strategy"]
    if wanted == "auto":
        return "shm" if obstacle(adapter, model) else "adapter"
    return wanted


def obstacle(adapter: Node, model: Node) -> str | None:
    """Return why the adapter alone cannot be pushed, None where it can: values, then remedy."""
    if adapter["_target_"] != LORA:
        return "there is no adapter: add adapter=lora, or use sync=auto"
    if adapter["modules_to_save"]:
        return (
            f"vLLM takes no whole modules with an adapter (adapter.modules_to_save="
            f"{adapter['modules_to_save']}): leave them out, or use sync=shm"
        )
    if adapter["rank"] > VLLM_RANKS[-1]:
        return (
            f"vLLM takes adapter.rank={VLLM_RANKS[-1]} at most, not {adapter['rank']}: lower it, "
            "or use sync=shm"
        )
    if model["_target_"] == TINY and model["warm_start"] is None:
        return (
            "the model is drawn by the trainer, so vLLM has no base to add an adapter to: give "
            "model.warm_start, or use sync=shm"
        )
    return None


@dataclass(frozen=True)
class AdapterRoom:
    """What vLLM keeps free for an adapter that it has not seen yet."""

    rank: int
    layers: list[str]  # last names of those that may be adapted


def adapter_room(chosen: Strategy, adapter: Node, model: Path) -> AdapterRoom | None:
    """Return the room to keep beside the model in a folder, None where no adapter is loaded.

    Only layers that are adapted get any. It saves time at every token, and an adapted head would
    break the probe: vLLM cannot give logprobs of a prompt then (vllm-project/vllm#51594).
    """
    if chosen != "adapter":
        return None
    wanted = adapter["target_modules"]
    names = linear_layers(model) if wanted == "all-linear" else wanted
    rank = next(rank for rank in VLLM_RANKS if rank >= adapter["rank"])
    return AdapterRoom(rank, sorted({name.rpartition(".")[2] for name in names}))


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
