"""Distillation by the generalised Jensen-Shannon divergence, between forward and reverse KL.

    m      = mix q + (1 - mix) p                                       q: teacher, p: policy
    loss_t = mix KL(q || m) + (1 - mix) KL(p || m)
    d loss_t / d log p_i = (1 - mix) p_i (log(p_i / m_i) - log(p_0 / m_0))

i = 1..K are the teacher's most likely tokens, and i = 0 is the rest: all other tokens together.
The loss is bounded, so no single token can dominate. loss / mix tends to the forward KL as mix
tends to 0, and loss / (1 - mix) tends to the reverse KL as mix tends to 1. So a mix near 0 or 1
needs a larger learning rate. GKD, arXiv:2306.13649.
"""

import math
from typing import Annotated

import torch
from msgspec import Meta

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens


def jsd_topk(tokens: Tokens, *, mix: Annotated[float, Meta(gt=0, lt=1)]) -> TokenLoss:
    """Return the generalised Jensen-Shannon divergence [N], at most ln 2."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    p, q = log_p.exp(), log_q.exp()
    # Stay in log space, because float32 rounds probabilities below e^-104 to 0, and log 0 is -inf.
    log_m = torch.logaddexp(log_q + math.log(mix), log_p + math.log(1 - mix))  # [N, K+1]
    loss = (mix * q * (log_q - log_m) + (1 - mix) * p * (log_p - log_m)).sum(-1)  # [N]
    return TokenLoss(loss, {"jsd": loss.detach()})
