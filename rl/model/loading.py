"""Load a model in Hugging Face form, prepare its layers for training, and write one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.model.folder import copy_tokenizer, holds_weights

_NAME = "sdpa_float32"
_LONGEST = 512  # tokens of a row; on longer rows the kernel in half precision is faster


def suit_cpu(model: PreTrainedModel) -> None:
    """Make a model on a CPU compute attention in float32 if that is faster."""
    AttentionInterface.register(_NAME, _compute_attention)
    # transformers finds the mask by the name of the attention.
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _compute_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return the attention in float32 for short rows in half precision.

    Queries, keys and values are [B, heads, T, head size].
    """
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[2] > _LONGEST:
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)
    attended, _ = sdpa_attention_forward(
        module, query.float(), key.float(), value.float(), *args, **kwargs
    )
    return attended.to(query.dtype), None


def load_model(folder: Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Load a local model folder; one without weights is initialised from its config and `seed`."""
    if holds_weights(folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    else:
        # Drawn in float32, so that a seed gives the same weights in any dtype, up to rounding.
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
        # Not the buffers, because rotary frequencies stay float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    if not torch.cuda.is_available():
        suit_cpu(model)
    return model


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep only the input of each layer for the backward pass."""
    # Reentrant checkpoints lose the gradient if the embeddings are frozen (LoRA).
    model.gradient_checkpointing_enable({"use_reentrant": False})


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile each layer for any number and length of rows; raise ValueError if there is none.

    torch.compile compiles the first layer, and all other layers reuse the result. Names of weights
    do not change. Embeddings, the chunked output head and DeepSpeed stay uncompiled.
    """
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        kind = type(model).__name__
        raise ValueError(f"trainer.compile=true finds no layers in a {kind}: set it to false")
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)


def write_model(
    model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, source: Path
) -> None:
    """Write `weights` in the form of `model` to `folder`, with the tokenizer files of `source`."""
    model.save_pretrained(folder, state_dict=dict(weights))
    copy_tokenizer(source, folder)
