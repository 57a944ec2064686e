"""Distributions over the teacher's K most likely tokens and one outcome for all other tokens.

    q_i = ref(token i), p_i = pi(token i)       i = 1..K: the teacher's most likely tokens
    q_0 = 1 - sum q_i,  p_0 = 1 - sum p_i       the rest: all other tokens as one more outcome

p and q are complete distributions over K+1 outcomes. So their divergence is never negative, is zero
only if p = q, and is at most the divergence over the full vocabulary. If the K probabilities were
renormalised to sum to 1, the loss would let the policy move probability to all other tokens
(arXiv:2608.14728). A sum over the K tokens alone is not a divergence: its minimum is not at p = q
(arXiv:2503.16870). A rest below 1e-6 is replaced by 1e-6 and has no gradient, because float32
sums of the K probabilities are not precise enough for a smaller rest.

N: completion tokens, K: candidates of each token.
"""

import torch
from torch import Tensor

from losses.tokens import Tokens

MIN_REST = 1e-6


def candidate_distributions(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return log p [N, K+1] with gradient, and log q [N, K+1]. Column K: all other tokens."""
    if tokens.candidate_logprobs is None or tokens.ref_candidate_logprobs is None:
        raise ValueError("this loss needs a teacher: use reference=model or reference=endpoint")
    return _add_rest(tokens.candidate_logprobs), _add_rest(tokens.ref_candidate_logprobs.detach())


def _add_rest(logprobs: Tensor) -> Tensor:
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)  # [N, 1]
    return torch.cat([logprobs, rest.clamp(min=MIN_REST).log()], -1)
