"""The tokens that a model finds likeliest, at each place. A chunk of logits at a time.

N: completion tokens, H: hidden size, K: candidates of each token.
"""

import torch
from torch import Tensor, nn

from rl.learner.output_head import chunk_logits


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
    never a candidate. `hidden` is [N, H]; `dtype` is what the head computes in.
    """
    weight = head.weight.to(dtype)
    parts = [
        chunk_logits(part, weight, head.bias, temperature)
        .log_softmax(-1)[:, :vocabulary]
        .topk(top_k)
        for part in hidden.split(chunk)
    ]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
