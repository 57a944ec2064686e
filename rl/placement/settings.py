"""Fill in process counts that are null in the YAML, and add vLLM flags that suit the devices."""

from collections.abc import Mapping
from typing import Any

from rl.config.facts import fact
from rl.config.schema import Run
from rl.placement.placement import Plan

# CPUs have no CUDA graphs. vLLM's CPU default, 128 sequences at a time, is half our batch_size.
_CPU_ARGS = {"enforce_eager": True, "max_num_seqs": 256}
# On a CPU vLLM 0.32 fails with "CPU Generator does not use offset" when it splits the prompt of a
# request with a seed. Equal requests may also be split differently, which changes the rounding.
_SEEDED_CPU_ARGS = {"no_enable_chunked_prefill": True}


def with_plan(run: Run, plan: Plan) -> Run:
    """Return the run with the plan's numbers of ranks and replicas, and with vLLM flags."""
    inference = with_device_flags(run.inference, run.sampler, plan.on_gpus)
    if "replicas" in inference and plan.inference:
        inference["replicas"] = len(plan.inference)
    return run.with_values({"inference": inference, "trainer.ranks": len(plan.ranks)})


def with_device_flags(
    inference: Mapping[str, Any], sampler: Mapping[str, Any], on_gpus: bool
) -> dict[str, Any]:
    """Return the inference config with vLLM flags for the devices. Keep the flags of the user.

    The user may write --max-num-seqs for max_num_seqs. The result has names with underscores.
    """
    # inference=external has no `args`, because the run cannot set flags of external servers.
    if not isinstance(inference.get("args"), Mapping):
        return dict(inference)
    given = {_option_name(k): value for k, value in inference["args"].items() if value is not None}
    names = {_flag_name(key) for key in given}
    seeded = sampler.get("seeded", fact(sampler["_target_"], "seeded", False))
    suitable = {} if on_gpus else _CPU_ARGS | (_SEEDED_CPU_ARGS if seeded else {})
    added = {key: value for key, value in suitable.items() if _flag_name(key) not in names}
    return {**inference, "args": {**added, **given}}


def _option_name(key: object) -> str:
    name, dot, inner = str(key).removeprefix("--").partition(".")
    return f"{name.replace('-', '_')}{dot}{inner}"


def _flag_name(option: str) -> str:
    """Return `name`, the flag that the option `name`, `name.key`, `name+` or `no_name` sets."""
    return option.partition(".")[0].rstrip("+").removeprefix("no_")
