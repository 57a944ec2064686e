"""DeepSpeed engines with float32 gradient sums and the same clipping in every ZeRO stage."""

import errno
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.serialization import safe_globals

from rl.learner.weight_gradients import use_float32_gradients
from rl.runtime.folder import UnusableFile, naming_damage

_TAG = "deepspeed"  # name of the checkpoint subfolder with an engine's files
# A checkpoint may contain these classes, besides tensors, numbers, strings and collections.
_STATE_CLASSES = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine, except that `load` never runs code from a file."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return a file's content. Raise ValueError if the file is damaged or may contain code."""
        with safe_globals(_STATE_CLASSES), naming_damage(Path(path)):
            try:
                return torch.load(path, map_location=map_location, weights_only=True)
            except (UnpicklingError, OSError) as error:
                # In some damaged files PyTorch seeks to an invalid offset, which raises EINVAL.
                if isinstance(error, OSError) and error.errno != errno.EINVAL:
                    raise
                # Omit PyTorch's message, because it advises users to allow an unsafe class.
                raise UnusableFile(
                    f"{path} is not loaded, because it is damaged, comes from an older DeepSpeed, "
                    "or contains unsafe code: remove its checkpoint to resume from an earlier one"
                ) from error


def start_engine(
    module: nn.Module,  # its state dict will contain only trained weights
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],  # keys of conf/deepspeed, overridden by `fixed_keys`
    *,
    max_grad_norm: float,  # gradients with a larger norm are scaled down to this norm
    half: bool,  # train bfloat16 weights with float32 master copies
    external: Iterable[nn.Parameter] = (),  # parameters that are also used outside of their module
) -> Any:
    """Return a DeepSpeed engine around `module` (Any, because DeepSpeed's types are incomplete)."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        module.register_state_dict_post_hook(_drop_frozen_weights)
        module.register_load_state_dict_post_hook(_ignore_missing_frozen_weights)
    fixed_keys = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires this key, but does not use it
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # with True, DeepSpeed decides when to step
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,  # allow optimizers that DeepSpeed has not tested
        "zero_force_ds_cpu_optimizer": False,  # allow any optimizer when the state is offloaded
    }
    if half:
        use_float32_gradients(module)
    sent = {"communication_data_type": "fp32"} if half else {}
    # Set data_types only in ZeRO stages 1 to 3, because DeepSpeed refuses this key in stage 0.
    is_split = config.get("zero_optimization", {}).get("stage", 0) > 0
    sums = {"data_types": {"grad_accum_dtype": "fp32"}} if half and is_split else {}
    # `deepspeed.initialize` may take an optimizer step to allocate the optimizer's state. With
    # learning rate 0 this step changes no weight.
    set_rate(optimizer, 0.0)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config={**sent, **sums, **config, **fixed_keys}
    )
    engine.checkpoint_engine = SafeCheckpointEngine(engine._config)
    stage = engine.zero_optimization_stage()
    if half:
        # Sum the gradients of the micro-batches in float32.
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
    if stage == 3:
        for parameter in external:  # make ZeRO-3 gather `parameter` for each pass of `module`
            deepspeed.zero.register_external_parameter(module, parameter)
    if stage == 0 and half:
        # Adam's bias correction must not count the step that `deepspeed.initialize` has taken.
        engine.optimizer.state.clear()
    elif stage == 0:
        # Replace DeepSpeed's clipping, because it reports no norm and keeps non-finite gradients.
        engine.clip_fp32_gradients = partial(_clip_gradients, engine, max_grad_norm)
    return engine


def gather(engine: Any, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[object]:
    """Return a context in which every rank has the whole parameters. Collective under ZeRO-3."""
    if engine.zero_optimization_stage() == 3:
        return deepspeed.zero.GatheredParameters(list(parameters))
    return nullcontext()


def set_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of each parameter group, scaled by the group's `lr_ratio`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def take_step(engine: Any, rate: float) -> float:
    """Take an optimizer step and return the gradient's norm, or NaN if the step was skipped."""
    set_rate(engine.optimizer, rate)
    # Skip ZeRO stages 1 to 3, in which DeepSpeed has already moved the gradients to its buffers.
    for parameter in engine.module.parameters() if engine.zero_optimization_stage() == 0 else ():
        # Create missing gradients in grad_dtype, because DeepSpeed would use the parameter's dtype.
        if parameter.grad is None and parameter.grad_dtype not in (None, parameter.dtype):
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return norm if math.isfinite(norm) else math.nan


def save_engine(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(str(folder), tag=_TAG, exclude_frozen_parameters=True)


def load_engine(engine: Any, folder: Path) -> None:
    """Load the engine's state. Raise ValueError if files are missing or damaged. Collective."""
    if not engine._get_all_ckpt_names(str(folder), _TAG):  # DeepSpeed's own error has no text
        raise ValueError(
            f"{folder} lacks DeepSpeed's files: restore them, or delete the checkpoint"
        )
    engine.load_checkpoint(str(folder), tag=_TAG)


def linearise(value: Tensor, gradients: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
    """Return the sum of gradients * outputs, where `gradients` are d value / d outputs.

    The sum has the same gradient for each weight as `value`. If `value` is not finite, return NaN,
    because NaN gradients make DeepSpeed skip the step and empty all gradient buffers on every rank.
    """
    terms = ((g * o).sum() for g, o in zip(gradients, outputs, strict=True))
    total = sum(terms, value.new_zeros(()))
    return total if value.isfinite() else total * float("nan")


def _clip_gradients(engine: Any, max_grad_norm: float) -> None:
    norm = clip_grad_norm_(engine.module.parameters(), max_grad_norm)
    engine._global_grad_norm = norm  # get_global_grad_norm returns this attribute
    if not norm.isfinite():
        engine.zero_grad()


def _drop_frozen_weights(module: nn.Module, state: dict[str, Any], *_: object) -> None:
    for name in state.keys() - _trained_names(module):
        del state[name]


def _ignore_missing_frozen_weights(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = _trained_names(module) & {*keys.missing_keys}


def _trained_names(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
