"""DeepSpeed, with the settings that make its step the step that was asked for.

gradients      are summed in float32 over any number of backward passes, because in bfloat16 the
               sum would lose what a later micro-batch adds; weight_gradients.py keeps each pass
               exact
clipping       is the same in every ZeRO stage, and a non-finite gradient changes nothing
first step     counts as Adam's first, although DeepSpeed steps once without gradients before it
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

_TAG = "deepspeed"  # the folder of a checkpoint that holds an engine's files


def start_engine(
    module: nn.Module,  # its state dict will hold only what is trained
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],  # conf/deepspeed, without the keys that the trainer decides
    *,
    max_grad_norm: float,  # length above which the gradient is scaled down
    half: bool,  # train bfloat16 weights with float32 masters
    external: Iterable[nn.Parameter] = (),  # used outside of their own module's forward
) -> Any:
    """Return DeepSpeed's engine around a module, untyped because its annotations are poor."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        module.register_state_dict_post_hook(_drop_frozen)
    fixed_keys = {
        "train_micro_batch_size_per_gpu": 1,  # required but unused: the batch plan decides
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # else it counts passes to decide when to step
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,  # DeepSpeed tested its own optimizers only
        "zero_force_ds_cpu_optimizer": False,  # allow other optimizers with offloaded state
    }
    if half:
        keep_weight_gradients(module)
    sums = _float32_sums(config) if half else {}
    # DeepSpeed may step once by itself to allocate the optimizer's state. At a learning rate of 0
    # not even weight decay moves a weight.
    set_rate(optimizer, 0.0)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config={**sums, **config, **fixed_keys}
    )
    stage = engine.zero_optimization_stage()
    if half:
        # In stage 0 autograd itself sums the micro-batches. The step needs no more memory, because
        # DeepSpeed would copy the sums to float32 anyway.
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
    if stage == 3:
        for parameter in external:  # gathered once per pass
            deepspeed.zero.register_external_parameter(module, parameter)
    if stage == 0 and half:
        # Forget the step above. Otherwise Adam corrects the bias of its first step as if it were
        # its second, and the step is too short.
        engine.optimizer.state.clear()
    elif stage == 0:
        # Here DeepSpeed does not report the norm, and steps even on a non-finite gradient.
        engine.clip_fp32_gradients = partial(_clip, engine, max_grad_norm)
    return engine


def _float32_sums(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that make DeepSpeed sum gradients, and send them, in float32."""
    keys: dict[str, Any] = {"communication_data_type": "fp32"}
    # Stage 0 refuses this key; there autograd sums.
    if config.get("zero_optimization", {}).get("stage", 0):
        keys["data_types"] = {"grad_accum_dtype": "fp32"}
    return keys


def whole(engine: Any, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
    """Gather these parameters on every rank for the block. Collective under ZeRO-3."""
    if engine.zero_optimization_stage() == 3:
        return deepspeed.zero.GatheredParameters(list(parameters))
    return nullcontext()


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def take_step(engine: Any, rate: float) -> float:
    """Step at this learning rate; return the length of the gradient.

    A non-finite gradient is dropped: nothing changes, and the result is NaN.
    """
    set_rate(engine.optimizer, rate)
    # In the other stages DeepSpeed has already taken the gradients out of the parameters.
    for parameter in engine.module.parameters() if engine.zero_optimization_stage() == 0 else ():
        # DeepSpeed would give a missing gradient the parameter's own dtype.
        if parameter.grad is None and parameter.grad_dtype not in (None, parameter.dtype):
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return norm if math.isfinite(norm) else math.nan


def save_engine(engine: Any, folder: Path, *, partly_frozen: bool) -> None:
    """Write what is trained and the optimizer's state. Collective."""
    engine.save_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=partly_frozen)


def load_engine(engine: Any, folder: Path, *, partly_frozen: bool) -> None:
    """Load what `save_engine` wrote; frozen weights come from the model's files. Collective."""
    path, _ = engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=not partly_frozen)
    if path is None:
        raise ValueError(f"{folder} holds no DeepSpeed state that can be loaded")


def moves_weights(value: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Return whether a backward pass from these gradients of `value` could change a weight.

    True for a non-finite value: by its gradient DeepSpeed learns that the step is to be skipped.
    """
    return not value.isfinite() or any(bool(gradient.any()) for gradient in gradients)


def linearised(value: Tensor, gradients: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """Return a loss whose gradient is that of `value`, given its gradients in the outputs.

    By the chain rule: the gradients are constants, the outputs carry the graph of the module.

    NaN if `value` is not finite. DeepSpeed looks at gradients only. A NaN in one of them reaches
    every rank, and each ZeRO stage then skips the step and empties its own buffers, which
    `zero_grad` does not do in all stages.
    """
    terms = ((g * o).sum() for g, o in zip(gradients, outputs, strict=True))
    total = sum(terms, value.new_zeros(()))
    return total if value.isfinite() else total * float("nan")


def _clip(engine: Any, max_grad_norm: float) -> None:
    """Clip as every other stage does; without gradients the optimizer does not step."""
    norm = clip_grad_norm_(engine.module.parameters(), max_grad_norm)
    engine._global_grad_norm = norm  # returned by get_global_grad_norm
    if not norm.isfinite():
        engine.zero_grad()


def _drop_frozen(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    """Drop frozen weights from a state dict; DeepSpeed itself overlooks the names of tied ones."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in state.keys() - trained:
        del state[name]
