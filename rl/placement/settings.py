"""What is null in the YAML because it follows the devices, filled in."""

from collections.abc import Mapping
from typing import Any

from rl.config.facts import fact
from rl.config.vllm_flags import plain
from rl.placement.placement import Plan

# On CPU there is nothing to capture, and vLLM would take 128 sequences at a time; on a GPU its own
# defaults know the card.
_CPU_ARGS = {"enforce_eager": True, "max_num_seqs": 256}
# On CPU vLLM 0.32 ends with "CPU Generator does not use offset" as soon as it takes a prompt whose
# request brings a seed in two pieces; and one in one piece is rounded the same way every time.
_SEEDED_CPU_ARGS = {"no_enable_chunked_prefill": True}


def settled(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a run's configuration with the numbers of its plan."""
    inference = settled_inference(config["inference"], config["sampler"], plan.on_gpus)
    if "replicas" in inference and plan.inference:
        inference["replicas"] = len(plan.inference)
    trainer = {**config["trainer"], "ranks": len(plan.ranks)}
    return {**config, "inference": inference, "trainer": trainer}


def settled_inference(
    node: Mapping[str, Any], sampler: Mapping[str, Any], on_gpus: bool
) -> dict[str, Any]:
    """Return the node of an inference with what suits its device and what is asked of it."""
    if not isinstance(node.get("args"), Mapping):  # nobody starts it
        return dict(node)
    said = {key: value for key, value in node["args"].items() if value is not None}
    names = {_flag(key) for key in said}
    seeded = sampler.get("seeded", fact(sampler["_target_"], "seeded", False))
    suits = {} if on_gpus else _CPU_ARGS | (_SEEDED_CPU_ARGS if seeded else {})
    ours = {key: value for key, value in suits.items() if _flag(key) not in names}
    return {**node, "args": {**ours, **said}}


def _flag(key: object) -> str:
    """The flag that a key turns on or off."""
    return plain(str(key)).removeprefix("no_")
