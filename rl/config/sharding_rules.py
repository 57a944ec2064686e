"""Which optimizers, offloads and compilers go with the stages of ZeRO."""

from collections.abc import Iterator, Mapping
from typing import Any

from rl.config.facts import fact
from rl.config.limits import value_of

Config = Mapping[str, Any]

OFFLOADS = {"offload_optimizer": "zero3_offload_optimizer", "offload_param": "zero3_offload"}


def optimizer_and_sharding(config: Config) -> Iterator[str]:
    """Refuse Muon from ZeRO stage 1 on, where matrices are flattened and split."""
    stage = value_of(config, "deepspeed.zero_optimization.stage")
    if stage not in (None, 0, 1, 2, 3) or isinstance(stage, bool):
        yield (
            f"deepspeed.zero_optimization.stage={stage}, but ZeRO has the stages 0 to 3: use "
            "deepspeed=zero0, zero1, zero2 or zero3"
        )
    for key, own in (("optim", "optim"), ("critic.optim", "optim@critic.optim")):
        optimizer = value_of(config, f"{key}._target_")
        if optimizer and fact(optimizer, "whole_matrices", False) and stage:
            yield (
                f"{optimizer} orthogonalises whole matrices, and ZeRO stage {stage} gives an "
                f"optimizer flattened pieces of them: use deepspeed=zero0, or {own}=adamw"
            )


def offload(config: Config) -> Iterator[str]:
    """Refuse offloading to the memory of the host without ZeRO 3.

    There DeepSpeed sums offloaded gradients in bfloat16, and a NaN stays in that sum.
    """
    stage = value_of(config, "deepspeed.zero_optimization.stage")
    for key, choice in OFFLOADS.items():
        path = f"deepspeed.zero_optimization.{key}.device"
        device = value_of(config, path)
        if device not in (None, "none") and stage != 3:
            yield (
                f"{path}={device} under ZeRO stage {stage} loses gradients or is ignored: use "
                f"deepspeed={choice}"
            )


def compilation(config: Config) -> Iterator[str]:
    """Refuse compilation under ZeRO 3, which gathers weights inside the compiled layers."""
    if value_of(config, "trainer.compile") and (
        value_of(config, "deepspeed.zero_optimization.stage") == 3
    ):
        yield (
            "trainer.compile=true compiles whole layers, and ZeRO stage 3 gathers weights inside "
            "them: use deepspeed=zero2, or trainer.compile=false"
        )
