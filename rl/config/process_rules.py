"""Check the options of processes: ZeRO, timeouts, GPUs, debugging, and vLLM's output head."""

from collections.abc import Iterator

from rl.config.facts import Config, fact, spans_hosts
from rl.config.limits import sampling_limits, value_of
from rl.config.schema import seconds_of

OFFLOADS = {"offload_optimizer": "zero3_offload_optimizer", "offload_param": "zero3_offload"}


def zero_stage_problems(config: Config) -> Iterator[str]:
    stage = value_of(config, "deepspeed.zero_optimization.stage")
    for key, group in (("optim", "optim"), ("critic.optim", "optim@critic.optim")):
        optimizer = value_of(config, f"{key}._target_")
        if optimizer and fact(optimizer, "whole_matrices", False) and stage:
            yield (
                f"{optimizer} orthogonalises whole matrices, but ZeRO stage {stage} gives the "
                f"optimizer flattened pieces of them: use deepspeed=zero0, or {group}=adamw"
            )
    # Below stage 3, DeepSpeed sums offloaded gradients in bfloat16 and skips all steps after a NaN.
    for key, choice in OFFLOADS.items():
        path = f"deepspeed.zero_optimization.{key}.device"
        device = value_of(config, path)
        if device not in (None, "none") and stage != 3:
            yield f"{path}={device} needs ZeRO stage 3, not {stage}: use deepspeed={choice}"
    if stage == 3 and value_of(config, "trainer.compile"):
        yield (
            "trainer.compile=true cannot compile layers in which ZeRO stage 3 gathers weights: "
            "use deepspeed=zero2, or trainer.compile=null"
        )


def rollout_timeout_problems(config: Config) -> Iterator[str]:
    episode, wait = value_of(config, "sampler.rollout_timeout"), config["trainer"]["wait_timeout"]
    if episode is not None and episode >= wait:
        yield (
            f"sampler.rollout_timeout={episode} s is not below trainer.wait_timeout={wait} s, so "
            f"one slow rollout would end the run: set trainer.wait_timeout above {episode}"
        )
    for path, limits in sampling_limits(config):
        own = limits.get("rollout_timeout")
        if episode is not None and isinstance(own, int | float) and own > episode:
            yield (
                f"{path}.rollout_timeout={own} exceeds sampler.rollout_timeout={episode}, the "
                "limit for every environment: raise sampler.rollout_timeout"
            )


def device_name_problems(config: Config) -> Iterator[str]:
    for key in ("inference.devices", "trainer.devices"):
        names = value_of(config, key)
        if names is not None and "cluster" in config and spans_hosts(config["cluster"]):
            yield (
                f"{key}={names} names GPUs of this machine, but {config['cluster']['_target_']} "
                f"may use other machines: set {key}=null, and CUDA_VISIBLE_DEVICES on each machine"
            )


def max_time_problems(config: Config) -> Iterator[str]:
    try:
        if (max_time := config.get("max_time")) is not None:
            seconds_of(max_time)
    except ValueError as error:
        yield f"max_time={error}, or null"


def debug_problems(config: Config) -> Iterator[str]:
    if config["trainer"]["debug"] and spans_hosts(config["cluster"]):
        yield "trainer.debug=true needs a trainer on this machine: use cluster=local"


def output_head_problems(config: Config) -> Iterator[str]:
    inference, head_dtype = config["inference"], value_of(config, "model.head_dtype")
    flags = [str(key).replace("-", "_") for key in (inference or {}).get("args", {})]
    if head_dtype and any("hf_overrides" in flag for flag in flags):
        yield (
            f"model.head_dtype={head_dtype} and inference.args.hf_overrides exclude each other, "
            "because the run passes head_dtype to vLLM as hf_overrides: set model.head_dtype=null, "
            "or put the other overrides into the model's config.json"
        )


PROCESS_RULES = (
    *(zero_stage_problems, rollout_timeout_problems, device_name_problems),
    *(max_time_problems, debug_problems, output_head_problems),
)
