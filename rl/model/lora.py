"""LoRA: small trained matrices beside frozen weights, arXiv:2106.09685 (conf/adapter).

    y = W x + scale * B (A dropout(x))       scale = alpha / rank, or alpha / sqrt(rank) with rslora

W is frozen. The run's seed initialises A randomly. B starts at zero, so the adapter changes nothing
at first. The experts of a mixture-of-experts model get no adapter, because vLLM could not load it.

Functions import torch and peft, because the supervisor imports this module without torch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from rl.config.ranges import BelowOne, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel

_NAME = "default"  # the adapter's name in peft
_SAVED = f".modules_to_save.{_NAME}."  # marks a trained copy of a module in peft's names of weights
_EXPERT_MATRICES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


@dataclass(frozen=True, kw_only=True)
class NoAdapter:
    def attach(self, model: PreTrainedModel, seed: int, base: str) -> PreTrainedModel:  # noqa: ARG002
        return model


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The options of conf/adapter/lora.yaml."""

    freezes_base: ClassVar[bool] = True

    rank: PositiveInt
    alpha: PositiveFloat
    dropout: BelowOne
    target_modules: Literal["all-linear"] | Annotated[list[str], Meta(min_length=1)]
    modules_to_save: list[str]
    rslora: bool

    def attach(self, model: PreTrainedModel, seed: int, base: str) -> PreTrainedModel:
        """Freeze `model`, insert trainable LoRA matrices of the same dtype, and return `model`.

        All ranks need the same seed. `base` names the base model in adapter_config.json.
        """
        import torch
        from peft import LoraConfig, get_peft_model

        self._check_module_names(model)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType] any number works
            lora_dropout=self.dropout,
            target_modules=self._target_names(model),
            modules_to_save=self.modules_to_save or None,
            use_rslora=self.rslora,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():  # keep the caller's random state unchanged
            torch.manual_seed(seed)
            # Do not let peft cast the matrices to float32, because DeepSpeed keeps float32 copies.
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
        config.base_model_name_or_path = base
        return wrapped.get_base_model()  # pyright: ignore[reportReturnType]

    def _target_names(self, model: PreTrainedModel) -> Literal["all-linear"] | list[str]:
        from torch import nn

        if self.target_modules != "all-linear" or not _has_experts(model):
            return self.target_modules
        head = model.get_output_embeddings()
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
        return sorted(linear - _EXPERT_MATRICES)

    def _check_module_names(self, model: PreTrainedModel) -> None:
        if _has_experts(model):
            check_targets(self.target_modules)
        all_modules = dict(model.named_modules())
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        are_tied = getattr(head, "weight", 0) is getattr(embedding, "weight", 1)
        named = [] if self.target_modules == "all-linear" else self.target_modules
        for key, modules in (("target_modules", named), ("modules_to_save", self.modules_to_save)):
            for module in modules:
                found = [m for name, m in all_modules.items() if f".{name}".endswith(f".{module}")]
                if key == "target_modules" and any(hasattr(m, "num_embeddings") for m in found):
                    raise ValueError(f"adapter.{key} contains {module}, an embedding: remove it")
                if key == "modules_to_save" and are_tied and (embedding in found or head in found):
                    raise ValueError(
                        f"adapter.{key} contains {module}, but embedding and head of this model "
                        f"share weights and cannot be trained separately: remove {module}"
                    )
                if not found:
                    known = sorted({name.rpartition(".")[2] for name in all_modules} - {""})
                    known = [name for name in known if not name.isdigit()]
                    raise ValueError(
                        f"adapter.{key} contains {module}, which the model does not have: choose "
                        f"from {', '.join(known)}"
                    )


def check_targets(targets: str | Sequence[str]) -> None:
    """Raise ValueError if `targets` names expert matrices. Call this only if there are experts."""
    if targets != "all-linear" and (
        named := {name.rpartition(".")[2] for name in targets} & _EXPERT_MATRICES
    ):
        raise ValueError(
            f"adapter.target_modules names {', '.join(sorted(named))}, which are matrices of the "
            "experts in this model, but vLLM cannot load an adapter of experts: set "
            "adapter.target_modules=all-linear, which leaves the experts out, or train all weights "
            "with adapter=none"
        )


def _has_experts(model: PreTrainedModel) -> bool:
    # Check the name, too, because weights of 1-d convolutions also have three dimensions.
    return any(
        parameter.ndim == 3 and "experts" in name.split(".")  # [experts, out, in]
        for name, parameter in model.named_parameters()
    )


def has_adapter(model: nn.Module) -> bool:
    return any(hasattr(module, "_disable_adapters") for module in model.modules())


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the adapter inside the block. The block must not compute gradients."""
    # Set peft's private flag, because peft's public method also changes requires_grad.
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    if not layers:
        raise ValueError("the model has no adapter to disable: set adapter=lora")
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


def active_module(module: Any) -> nn.Module:
    """Return peft's trained copy of `module` if it exists and is enabled, else the original."""
    copies = getattr(module, "modules_to_save", None)
    if copies is None:
        return module
    return module.original_module if module.disable_adapters else copies[_NAME]


@dataclass(frozen=True)
class Recipe:
    """The name of a tensor that is pushed or saved, and the function that computes it."""

    name: str
    parts: list[Any]  # arguments of `make`; under ZeRO-3 the caller gathers them
    make: Callable[..., Tensor]


def full_recipes(model: nn.Module) -> Iterator[Recipe]:
    """Yield a recipe for each weight with the adapter merged into it, named as in transformers."""
    saved = model.state_dict()  # has the buffers that belong to a checkpoint
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for name, parameter in [*model.named_parameters(), *buffers]:
        owner, is_base, leaf = name.rpartition(".base_layer.")
        if ".lora_" in name or ".original_module." in name:
            continue
        if is_base and leaf == "weight":
            layer: Any = model.get_submodule(owner)
            parts = [parameter, layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight]
            yield Recipe(f"{owner}.weight", parts, partial(_merge, layer))
        else:
            plain = name.replace(".base_layer.", ".").replace(_SAVED, ".")
            yield Recipe(plain, [parameter], lambda weight: weight.detach())


def adapter_recipes(model: nn.Module) -> Iterator[Recipe]:
    """Yield a recipe for each trained tensor, named as in peft's adapter files."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = name.replace(_SAVED, ".").replace(f".{_NAME}.weight", ".weight")
            yield Recipe(f"base_model.model.{plain}", [parameter], lambda weight: weight.detach())


def _merge(layer: Any, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    import torch

    # base: [out, in], a: [rank, in], b: [out, rank]
    exact = torch.promote_types(base.dtype, torch.float32)
    update = b.detach().to(exact) @ a.detach().to(exact) * layer.scaling[_NAME]
    update = update.T if layer.fan_in_fan_out else update
    return (base.detach().to(exact) + update).to(base.dtype)


def write_adapter(model: nn.Module, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which peft and vLLM can load."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(model), indent=2))
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def peft_config(model: Any) -> dict[str, Any]:
    config = copy.copy(model.peft_config[_NAME])
    config.inference_mode = True
    return json.loads(json.dumps(config.to_dict(), default=list, sort_keys=True))
