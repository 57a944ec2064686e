"""DeepSpeed, and what it must be told so that a step is the step that was asked for.

gradients      add up over any number of backward passes, until step(), and in float32: in bfloat16
               what a micro-batch adds would be lost in the sum of those before it; no gradient
               of a matrix is rounded on the way there (weight_gradients.py)
clipping       alike in every stage, and a gradient that is not finite changes nothing
first step     Adam's is the first, though DeepSpeed takes one without gradients on its way
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from rl.learner.weight_gradients import keep_weight_gradients

_TAG = "deepspeed"  # of a checkpoint: the folder in which an engine's files lie


def start_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    *,
    max_grad_norm: float,
    half: bool,
    external: Iterable[nn.Parameter] = (),
) -> Any:
    """Return DeepSpeed's engine around a module; DeepSpeed's own annotations are of little use.

    Args:
        module: what is trained. Its state dict keeps what is trained alone, if not all of it is.
        optimizer: over its parameters.
        config: DeepSpeed's own keys (conf/deepspeed), less those that are ours.
        max_grad_norm: length above which the gradient is scaled down.
        half: bfloat16 with float32 master weights.
        external: parameters that are used outside of their own module's forward.

    """
    if not all(parameter.requires_grad for parameter in module.parameters()):
        module.register_state_dict_post_hook(_forget_frozen)
    fixed_keys = {
        "train_micro_batch_size_per_gpu": 1,  # required, unused: the plan decides
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # else it counts passes to find out when to step
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,  # it tested its own, not torch's
        "zero_force_ds_cpu_optimizer": False,  # nor is offloading the state of another one refused
    }
    if half:
        keep_weight_gradients(module)
    # To allocate the optimizer's state DeepSpeed may step once, unasked: at rate 0 not even weight
    # decay moves anything.
    set_rate(optimizer, 0.0)
    sums = _sums(config.get("zero_optimization", {}).get("stage", 0)) if half else {}
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config={**sums, **config, **fixed_keys}
    )
    stage = engine.zero_optimization_stage()
    if half:
        _keep_float32(module)
    if stage == 3:
        for parameter in external:  # gathered once for a pass
            deepspeed.zero.register_external_parameter(module, parameter)
    if stage == 0 and half:
        # It has counted that step: Adam would correct its first as if a second, and be too short.
        engine.optimizer.state.clear()
    elif stage == 0:
        # Here DeepSpeed keeps the norm to itself, and steps on gradients that are not finite.
        engine.clip_fp32_gradients = partial(_clip, engine, max_grad_norm)
    return engine


def whole(engine: Any, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
    """A block in which every rank has all of these parameters. Collective under ZeRO-3."""
    if engine.zero_optimization_stage() == 3:
        return deepspeed.zero.GatheredParameters(list(parameters))
    return nullcontext()


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def take_step(engine: Any, rate: float) -> float:
    """Step at this learning rate and return the length of the gradient.

    NaN for a gradient that is not finite: it is forgotten, and nothing has changed.
    """
    set_rate(engine.optimizer, rate)
    # The other stages have taken the gradients already.
    for parameter in engine.module.parameters() if engine.zero_optimization_stage() == 0 else ():
        # DeepSpeed would give one that no token reached a gradient of the parameter's own dtype.
        if parameter.grad is None and parameter.grad_dtype not in (None, parameter.dtype):
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return norm if math.isfinite(norm) else math.nan


def save_engine(engine: Any, folder: Path, *, partly_frozen: bool) -> None:
    """Write what is trained and the optimizer's state. Collective."""
    engine.save_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=partly_frozen)


def load_engine(engine: Any, folder: Path, *, partly_frozen: bool) -> None:
    """Take up what `save_engine` wrote. Collective."""
    # What is frozen is not in there: it came from the model's own files.
    path, _ = engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=not partly_frozen)
    if path is None:
        raise ValueError(f"{folder} holds no DeepSpeed state that can be loaded")


def moves(value: Tensor, slopes: Sequence[Tensor]) -> bool:
    """Whether a backward pass from these slopes of `value` could change any weight."""
    # NaN goes backward as well: by its gradient DeepSpeed learns that the step is to be skipped.
    return not value.isfinite() or any(bool(slope.any()) for slope in slopes)


def linearised(value: Tensor, slopes: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """Return what has the gradient of `value`, given its slopes in the module's outputs.

    NaN if `value` is not finite. DeepSpeed looks at gradients only: a NaN in one of them reaches
    every rank, and each ZeRO stage then skips the step and empties its own buffers, which
    `zero_grad` does not do under all of them.
    """
    # Slopes are constants here, so the gradient is slope times that of the output: the chain rule.
    share = sum(((s * o).sum() for s, o in zip(slopes, outputs, strict=True)), value.new_zeros(()))
    return share if value.isfinite() else share * float("nan")


def _sums(stage: int) -> dict[str, Any]:
    """What makes DeepSpeed add up, and send between ranks, in float32."""
    # Stage 0 refuses the first key: there autograd keeps the sums (see below).
    sums: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if stage else {}
    return sums | {"communication_data_type": "fp32"}


def _keep_float32(module: nn.Module) -> None:
    """Let autograd give bfloat16 parameters float32 gradients, as they were summed.

    In stage 0 it adds up the micro-batches itself. No more memory at the step, where DeepSpeed
    would copy the sums to float32 anyway.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def _clip(engine: Any, max_grad_norm: float) -> None:
    """Clip as every other stage does; without gradients the optimizer steps nowhere."""
    norm = clip_grad_norm_(engine.module.parameters(), max_grad_norm)
    engine._global_grad_norm = norm  # what get_global_grad_norm returns
    if not norm.isfinite():
        engine.zero_grad()


def _forget_frozen(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    """Leave only what is trained in a state dict: the rest comes from the model's own files.

    DeepSpeed's own exclusion overlooks the second name of tied weights.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in state.keys() - trained:
        del state[name]
