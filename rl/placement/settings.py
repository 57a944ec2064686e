"""What is null in the YAML because it follows the devices, filled in."""

from collections.abc import Mapping
from typing import Any

from rl.config.vllm_flags import plain
from rl.placement.placement import Plan

# On CPU there is nothing to capture, and vLLM would take 128 sequences at a time; on a GPU its own
# defaults know the card.
_CPU_ARGS = {"enforce_eager": True, "max_num_seqs": 256}


def settled(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a run's configuration with the numbers of its plan."""
    inference = settled_inference(config["inference"], plan.on_gpus)
    if "replicas" in inference and plan.inference:
        inference["replicas"] = len(plan.inference)
    trainer = {**config["trainer"], "ranks": len(plan.ranks)}
    return {**config, "inference": inference, "trainer": trainer}


def settled_inference(node: Mapping[str, Any], on_gpus: bool) -> dict[str, Any]:
    """Return the node of an inference with what suits its device."""
    if not isinstance(node.get("args"), Mapping):  # nobody starts it
        return dict(node)
    said = {key: value for key, value in node["args"].items() if value is not None}
    names = {plain(str(key)).removeprefix("no_") for key in said}
    ours = {} if on_gpus else {k: v for k, v in _CPU_ARGS.items() if k not in names}
    return {**node, "args": {**ours, **said}}
