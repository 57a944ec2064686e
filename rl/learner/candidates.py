"""Logprobs of several tokens at one place: of given ones with gradient, or of the likeliest.

Logits exist a chunk at a time, as in logprobs.py.

N: completion tokens, H: hidden size, V: vocabulary, K: candidates of each token.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def candidate_logprobs(
    head: nn.Linear,
    hidden: Tensor,
    candidates: Tensor,
    temperature: float,
    chunk: int,
    dtype: torch.dtype,
) -> Tensor:
    """Logprobs [N, K] of `candidates` [N, K] after `hidden` [N, H]; chunks are made twice.

    `dtype`: the one in which hidden states and the head's weight are multiplied.
    """

    def of_chunk(part: Tensor, ids: Tensor) -> Tensor:
        return _log_softmax(head, part, temperature, dtype).gather(-1, ids)

    parts = zip(hidden.split(chunk), candidates.split(chunk), strict=True)
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(of_chunk, *part, use_reentrant=False) for part in parts])
    return torch.cat([of_chunk(*part) for part in parts])


@torch.no_grad()
def most_likely(
    head: nn.Linear,
    hidden: Tensor,
    top_k: int,
    vocabulary: int,
    temperature: float,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest of the first `vocabulary` tokens [N, K], and their logprobs [N, K].

    Models of one family pad their vocabularies differently: what the policy has no logit for is
    never a candidate.
    """
    parts = [
        _log_softmax(head, part, temperature, dtype)[:, :vocabulary].topk(top_k)
        for part in hidden.split(chunk)
    ]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def _log_softmax(head: nn.Linear, hidden: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """[chunk, V], at least in float32."""
    # Not head(hidden): under ZeRO-3 a module call is a collective, and ranks differ in chunks.
    bias = None if head.bias is None else head.bias.to(dtype)
    logits = nn.functional.linear(hidden.to(dtype), head.weight.to(dtype), bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return logits.log_softmax(-1)
