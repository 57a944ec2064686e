"""Distillation by reverse KL over the teacher's K most likely tokens and the rest.

    loss_t = KL(p || q) = sum over i of p_i (log p_i - log q_i)        q: teacher, p: policy
    d loss_t / d log p_i = p_i ((log p_i - log q_i) - (log p_0 - log q_0))

i = 1..K are the teacher's most likely tokens, and i = 0 is the rest: all other tokens together.
`distill` estimates the reverse KL from the sampled token alone. This loss sums over K + 1 outcomes,
so it has no sampling noise. The reverse KL is from arXiv:2306.13649, and the rest as one more
outcome is from arXiv:2608.14728. The loss is mode-seeking. It penalises tokens that the teacher
finds unlikely, and does not penalise the omission of tokens that the teacher finds likely.
"""

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens


def reverse_kl_topk(tokens: Tokens) -> TokenLoss:
    """Return the reverse KL [N]. Metric rest [N]: the policy's probability of all other tokens."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    loss = (log_p.exp() * (log_p - log_q)).sum(-1)  # [N]
    return TokenLoss(loss, {"reverse_kl": loss.detach(), "rest": log_p[:, -1].detach().exp()})
