"""How the weights of a run travel to vLLM, decided once for all parts.

adapter   the LoRA matrices alone, through memory on one host, else in the body of the request
shm       all weights through memory, on one host
gloo      all weights through TCP
disk      all weights through a folder that trainer and vLLM both see
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import W_OK, access
from pathlib import Path
from typing import Any, Literal

from rl.config.facts import fact, is_external, spans_hosts

Transport = Literal["shm", "adapter", "gloo", "disk"]
SyncChoice = Literal["auto", "shm", "adapter", "gloo", "disk", "nccl", "ipc"]
Node = Mapping[str, Any]

# The room vLLM can keep for an adapter.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Way:
    """How weights travel, and why so, in half a sentence."""

    transport: Transport
    why: str


def transport(config: Node) -> Transport:
    """Return how the weights of a resolved configuration travel."""
    return way(config).transport


def way(config: Node) -> Way:
    """Return what `sync` asks for, or for `auto` the smallest push that is exact."""
    choice = config["sync"]["transport"]
    if choice != "auto":
        return Way(choice, f"sync={choice}")
    if not (why_whole := obstacle(config["adapter"], config["model"])):
        return Way("adapter", "nothing else is trained, and vLLM adds it to its own base")
    why_whole = why_whole.partition(":")[0]
    if apart := hosts_apart(config):
        return Way("gloo", f"{why_whole}; {apart}")
    return Way("shm", f"{why_whole}; trainer and vLLM share a host")


def hosts_apart(config: Node) -> str | None:
    """Return why vLLM may be on another host than the trainer, None where it cannot."""
    cluster = config.get("cluster")
    if is_external(config.get("inference")):
        return "vLLM was started by somebody else and may be on another host"
    if cluster and spans_hosts(cluster):
        return "the run spans several hosts"
    return None


def obstacle(adapter: Node, model: Node) -> str | None:
    """Return why the adapter alone cannot be pushed, None where it can: values, then remedy."""
    if not fact(adapter["_target_"], "freezes_base", False):
        return "there is no adapter: add adapter=lora, or use sync=auto"
    if adapter["modules_to_save"]:
        return (
            f"vLLM takes no whole modules with an adapter (adapter.modules_to_save="
            f"{adapter['modules_to_save']}): leave them out, or use sync=auto"
        )
    if adapter["rank"] > VLLM_RANKS[-1]:
        return (
            f"vLLM takes adapter.rank={VLLM_RANKS[-1]} at most, not {adapter['rank']}: lower it, "
            "or use sync=auto"
        )
    if fact(model["_target_"], "drawn_by_trainer", False) and model["warm_start"] is None:
        return (
            "the model is drawn by the trainer, so vLLM has no base to add an adapter to: give "
            "model.warm_start, or use sync=auto"
        )
    return None


def transport_problems(config: Node) -> Iterator[str]:
    """A way that these hosts or this policy do not have: values, then remedy."""
    sync = config["sync"]
    choice, folder, apart = sync["transport"], sync["folder"], hosts_apart(config)
    if choice == "adapter" and (why := obstacle(config["adapter"], config["model"])):
        yield f"sync=adapter, but {why}"
    if choice == "shm" and apart:
        yield f"sync=shm goes through the memory of one host, but {apart}: use sync=gloo"
    if choice in ("nccl", "ipc"):
        yield (
            f"sync.transport={choice} moves weights from GPU to GPU and is not built yet: use "
            "sync=auto, which goes through the memory of the hosts"
        )
    if choice == "disk" and folder is None and is_external(config.get("inference")):
        yield f"sync=disk needs a folder that all hosts see, for {apart}: give sync.folder"
    if choice == "disk" and folder is not None:
        above = next(p for p in (Path(folder), *Path(folder).absolute().parents) if p.exists())
        if not above.is_dir() or not access(above, W_OK):
            yield f"sync.folder={folder} cannot be written ({above}): choose another"
