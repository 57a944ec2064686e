"""Attention on a CPU: in float32, whatever the dtype of the model.

The fused kernel is fast there in float32 alone. Forward and backward of 8,192 tokens, 4 heads of
32, one thread with AVX512-BF16, in milliseconds:

    tokens of a row            64   128   256   512   1024
    fused, bfloat16            78    82    82   131    152
    plain, bfloat16            36    64   170   313    613
    fused, float32 and back    26    37    64   122    181
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "sdpa_float32"
_LONGEST = 512  # tokens of a row


def suit_cpu(model: PreTrainedModel) -> None:
    """Let a model that trains on a CPU attend in float32 where that is faster."""
    AttentionInterface.register(_NAME, _attend)
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
