"""Distillation away from unlikely tokens of the teacher: reverse KL over its K likeliest tokens.

    loss_t = KL(p || q) = sum over i of p_i (log p_i - log q_i)        q: teacher, p: policy
    d loss_t / d log p_i = p_i ((log p_i - log q_i) - (log p_0 - log q_0))

`distill` estimates this divergence from the sampled token. Here it is summed over the candidates,
which has the same minimum without the noise of sampling (arXiv:2306.13649; with the rest as one
more outcome arXiv:2608.14728). Mode-seeking: the policy pays for tokens that the teacher would not
say, and not for omitting tokens that the teacher would say.
"""

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens


def reverse_kl_topk(tokens: Tokens) -> TokenLoss:
    """Return the reverse KL [N]; rest [N] is the policy's probability of the rest."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    loss = (log_p.exp() * (log_p - log_q)).sum(-1)  # [N]
    return TokenLoss(loss, {"reverse_kl": loss.detach(), "rest": log_p[:, -1].detach().exp()})
