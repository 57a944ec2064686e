"""Load a model in Hugging Face form from a folder, and write one."""

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

from rl.model.folder import copy_tokenizer, holds_weights

_NAME = "sdpa_float32"
_LONGEST = 512  # tokens of a row; on longer rows the kernel in half precision is faster


def suit_cpu(model: PreTrainedModel) -> None:
    """Make a model on a CPU compute attention in float32 if that is faster."""
    AttentionInterface.register(_NAME, _attend)
    # transformers finds the mask by the name of the attention.
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Queries, keys and values are [B, heads, T, head size]."""
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
        for (
            parameter
        ) in model.parameters():  # not the buffers, because rotary frequencies stay float32
            parameter.data = parameter.data.to(dtype)
    if not torch.cuda.is_available():
        suit_cpu(model)
    return model


def write_model(
    model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path, source: Path
) -> None:
    """Write `weights` in the form of `model` to `folder`, with the tokenizer files of `source`."""
    model.save_pretrained(folder, state_dict=dict(weights))
    copy_tokenizer(source, folder)
