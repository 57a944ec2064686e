"""On-policy distillation: reverse KL to a teacher on the policy's own tokens.

    loss_t = -stop_gradient(log ref - log pi) * log pi             ref: the teacher

A policy gradient whose advantage is how much more the teacher likes the token; its expectation
over pi's own tokens is the gradient of KL(pi || ref). Rewards play no part. arXiv:2306.13649.
"""

from losses.tokens import TokenLoss, Tokens


def distill(tokens: Tokens) -> TokenLoss:
    """Distillation loss [N]; reverse_kl is the estimate log pi - log ref of what it minimises."""
    if tokens.ref_logprobs is None:
        raise ValueError("distill needs a teacher: the tokens came without ref_logprobs")
    reverse_kl = (tokens.logprobs - tokens.ref_logprobs).detach()  # [N]
    return TokenLoss(reverse_kl * tokens.logprobs, {"reverse_kl": reverse_kl})
