"""Between forward and reverse KL: the generalised Jensen-Shannon divergence of GKD.

    m      = mix q + (1 - mix) p                                       q: teacher, p: policy
    loss_t = mix KL(q || m) + (1 - mix) KL(p || m)                     over candidates and rest
    d loss_t / d log p_i = (1 - mix) p_i (log(p_i / m_i) - log(p_0 / m_0))

arXiv:2306.13649. Bounded, so no single token can dominate. loss / mix tends to the forward KL as
mix tends to 0, loss / (1 - mix) to the reverse KL as it tends to 1: a mix near either end wants a
learning rate to match.
"""

import math

import torch

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens

RANGES = {"mix": "> 0 and < 1"}


def jsd_topk(tokens: Tokens, *, mix: float) -> TokenLoss:
    """Generalised Jensen-Shannon divergence [N], at most ln 2."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    p, q = log_p.exp(), log_q.exp()
    # Not log(mix q + (1 - mix) p): in float32 both are 0 from -104 nats on, and 0 * infinity NaN.
    log_m = torch.logaddexp(log_q + math.log(mix), log_p + math.log(1 - mix))  # [N, K+1]
    loss = (mix * q * (log_q - log_m) + (1 - mix) * p * (log_p - log_m)).sum(-1)  # [N]
    return TokenLoss(loss, {"jsd": loss.detach()})
