"""Distillation away from what the teacher would not say: reverse KL over its likeliest tokens.

    loss_t = KL(p || q) = sum over i of p_i (log p_i - log q_i)        q: teacher, p: policy
    d loss_t / d log p_i = p_i ((log p_i - log q_i) - (log p_0 - log q_0))

What `distill` estimates by the sampled token alone is summed here over the candidates: the same
minimum, without the noise of the draw (arXiv:2306.13649; with the rest as one more outcome
arXiv:2608.14728). Seeks a mode: it costs to say what the teacher would not, not to leave out what
it would.
"""

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens


def reverse_kl_topk(tokens: Tokens) -> TokenLoss:
    """Reverse KL [N]; rest is what the policy gives to all but the teacher's candidates."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    loss = (log_p.exp() * (log_p - log_q)).sum(-1)  # [N]
    return TokenLoss(loss, {"reverse_kl": loss.detach(), "rest": log_p[:, -1].detach().exp()})
