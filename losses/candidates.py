"""Distributions over the teacher's K most likely tokens and the rest, for losses that compare them.

    q_i = ref(token i), p_i = pi(token i)       i: the K candidates of the token's place
    q_0 = 1 - sum q_i,  p_0 = 1 - sum p_i       the rest of the vocabulary as one more outcome

The K+1 outcomes are two whole distributions, so their divergence is one: never negative, zero only
where they agree, and at most that of the vocabulary. Without the rest (renormalised to the K) what
the policy does elsewhere would cost nothing, and it drifts there: arXiv:2608.14728 for the reverse
divergence; a sum that is merely cut off is no divergence and has its minimum elsewhere:
arXiv:2503.16870 for the forward one. The rest counts as 1e-6 where it is less, with no gradient:
in float32 nothing of it is known there.

N: completion tokens, K: candidates of each.
"""

import torch
from torch import Tensor

from losses.tokens import Tokens

MIN_REST = 1e-6


def candidate_distributions(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """log p [N, K+1], with gradient, and log q [N, K+1]; the rest comes last."""
    if tokens.candidate_logprobs is None or tokens.ref_candidate_logprobs is None:
        raise ValueError("a comparison of distributions needs a teacher's candidates: none came")
    return _with_rest(tokens.candidate_logprobs), _with_rest(tokens.ref_candidate_logprobs.detach())


def _with_rest(logprobs: Tensor) -> Tensor:
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)  # [N, 1]
    return torch.cat([logprobs, rest.clamp(min=MIN_REST).log()], -1)
