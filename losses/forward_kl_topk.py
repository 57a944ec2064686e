"""Distillation towards all that the teacher would have said: forward KL over its likeliest tokens.

    loss_t = KL(q || p) = sum over i of q_i (log q_i - log p_i)        q: teacher, p: policy
    d loss_t / d log p_i = -q_i + q_0 p_i / p_0                        i = 1..K, the candidates

Covers the teacher's modes, all of them, as imitation does, with every candidate as a soft label. A
comparison of distributions needs no token of its own, so any text will do: the policy's
(arXiv:2306.13649, GKD with lambda 1), or a demonstration's (lambda 0).
"""

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens


def forward_kl_topk(tokens: Tokens) -> TokenLoss:
    """Forward KL [N]; ref_rest is what the teacher gives to all but its candidates."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    loss = (log_q.exp() * (log_q - log_p)).sum(-1)  # [N]
    return TokenLoss(loss, {"forward_kl": loss.detach(), "ref_rest": log_q[:, -1].exp()})
