"""Choose the sender of conf/sync that pushes weights to vLLM, and check its requirements."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl.config.facts import fact, is_external, spans_hosts

Node = Mapping[str, Any]
NO_ADAPTED_EXPERTS = "vLLM 0.32 cannot run a mixture of experts with an adapter on a CPU"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM allows for max_lora_rank


@dataclass(frozen=True)
class Transport:
    """The chosen weight sender; `node` is its configuration node."""

    node: Node

    @property
    def name(self) -> str:
        """The name of the sender's module, which is unique because each sender has its own file."""
        return self.node["_target_"].split(".")[-2]

    def has(self, name: str) -> bool:
        """Return the sender's boolean class variable `name` (see rl/weights/transport.py)."""
        return fact(self.node["_target_"], name, False)


def transport(config: Node) -> Transport:
    """Return the sender. sync=auto means adapter if possible, else shm on one host, else gloo."""
    chosen = Transport(config["sync"])
    if not chosen.has("is_placeholder"):
        return chosen
    if adapter_obstacle(config["adapter"], config["model"]) is None:
        target = "rl.weights.adapter.AdapterSender"
    elif why_several_hosts(config):
        target = "rl.weights.gloo.GlooSender"
    else:
        target = "rl.weights.shm.ShmSender"
    return Transport({**chosen.node, "_target_": target})


def why_several_hosts(config: Node) -> str | None:
    cluster = config.get("cluster")
    if is_external(config.get("inference")):
        return "an external vLLM may be on another host"
    if cluster and spans_hosts(cluster):
        return "the run spans several hosts"
    return None


def adapter_obstacle(adapter: Node, model: Node) -> str | None:
    """Return why the adapter alone cannot be pushed (values, then remedy), or None if it can."""
    if not fact(adapter["_target_"], "freezes_base", False):
        return "the run trains no adapter: use adapter=lora, or sync=auto"
    if adapter["modules_to_save"]:
        return (
            f"vLLM cannot load whole modules as an adapter (adapter.modules_to_save="
            f"{adapter['modules_to_save']}): set adapter.modules_to_save=[], or use sync=auto"
        )
    if fact(model["_target_"], "has_experts", False):
        return f"{NO_ADAPTED_EXPERTS}: use sync=auto"
    if adapter["rank"] > VLLM_RANKS[-1]:
        return (
            f"adapter.rank={adapter['rank']} is too high for vLLM: set adapter.rank="
            f"{VLLM_RANKS[-1]} or less, or use sync=auto"
        )
    if fact(model["_target_"], "drawn_by_trainer", False) and model["warm_start"] is None:
        return (
            "the trainer initialises the model randomly, so vLLM has no base model for an adapter: "
            "use a model with model.warm_start, or sync=auto"
        )
    return None


def placement_problem(chosen: Transport, *, on_gpus: bool, shared: bool) -> str | None:
    """Return why the sender cannot be used, or None. `shared`: trainer and vLLM share a GPU."""
    if chosen.has("on_gpus") and not on_gpus:
        return f"sync={chosen.name} sends weights between GPUs, but the run has none: use sync=auto"
    if chosen.has("own_gpus") and shared:
        return (
            f"sync={chosen.name}, but trainer and vLLM share a GPU, and NCCL cannot have two ranks "
            "on one GPU: use sync=ipc or sync=shm"
        )
    return None


def transport_problems(config: Node) -> Iterator[str]:
    chosen = transport(config)
    if chosen.has("adapter_only") and (why := adapter_obstacle(config["adapter"], config["model"])):
        yield f"sync={chosen.name}, but {why}"
    if chosen.has("one_host") and (apart := why_several_hosts(config)):
        yield f"sync={chosen.name} needs trainer and vLLM on one host, but {apart}: use sync=gloo"
