"""Distillation by forward KL over the teacher's K most likely tokens and the rest.

    loss_t = KL(q || p) = sum over i of q_i (log q_i - log p_i)        q: teacher, p: policy
    d loss_t / d log p_i = -q_i + q_0 p_i / p_0                        for i > 0

i = 1..K are the teacher's most likely tokens, and i = 0 is the rest: all other tokens together.
The policy learns all modes of the teacher, because a token that only the teacher finds likely has a
large loss. The loss does not depend on the sampled token, so it works on the policy's text
(arXiv:2306.13649, GKD with lambda 1) and on demonstrations (lambda 0).
"""

from losses.candidates import candidate_distributions
from losses.tokens import TokenLoss, Tokens


def forward_kl_topk(tokens: Tokens) -> TokenLoss:
    """Return the forward KL [N]. Metric ref_rest [N]: the teacher's probability of other tokens."""
    log_p, log_q = candidate_distributions(tokens)  # [N, K+1]
    loss = (log_q.exp() * (log_q - log_p)).sum(-1)  # [N]
    return TokenLoss(loss, {"forward_kl": loss.detach(), "ref_rest": log_q[:, -1].exp()})
