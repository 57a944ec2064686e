"""How the weights of a run travel to vLLM, decided once for all parts."""

from collections.abc import Mapping
from typing import Any, Literal

from rl.config.facts import fact

Transport = Literal["shm", "adapter"]
Node = Mapping[str, Any]

# The room vLLM can keep for an adapter.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def transport(sync: Node, adapter: Node, model: Node) -> Transport:
    """Return the transport `sync` asks for, or for `auto` the smallest push that is exact."""
    choice = sync["transport"]
    if choice == "auto":
        return "shm" if obstacle(adapter, model) else "adapter"
    return choice


def obstacle(adapter: Node, model: Node) -> str | None:
    """Return why the adapter alone cannot be pushed, None where it can: values, then remedy."""
    if not fact(adapter["_target_"], "freezes_base", False):
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
    if fact(model["_target_"], "drawn_by_trainer", False) and model["warm_start"] is None:
        return (
            "the model is drawn by the trainer, so vLLM has no base to add an adapter to: give "
            "model.warm_start, or use sync=shm"
        )
    return None
