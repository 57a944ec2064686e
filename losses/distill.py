"""On-policy distillation: reverse KL to a teacher on the policy's own tokens.

    loss_t = -stop_gradient(log ref - log pi) * log pi             ref: the teacher

A policy gradient whose advantage is log ref - log pi. Its expectation over pi's own tokens is the
gradient of KL(pi || ref). It uses no rewards. arXiv:2306.13649.
"""

from losses.tokens import TokenLoss, Tokens


def distill(tokens: Tokens) -> TokenLoss:
    """Return the loss [N]; reverse_kl [N] is log pi - log ref, an estimate of the divergence."""
    if tokens.ref_logprobs is None:
        raise ValueError("distill needs a teacher: the tokens came without ref_logprobs")
    reverse_kl = (tokens.logprobs - tokens.ref_logprobs).detach()  # [N]
    return TokenLoss(reverse_kl * tokens.logprobs, {"reverse_kl": reverse_kl})
