"""On-policy distillation: reverse KL to a teacher on the policy's own tokens.

    loss_t = -stop_gradient(log ref - log pi) * log pi             ref: the teacher

This is a policy gradient with the advantage log ref - log pi. The mean gradient of the loss over
tokens sampled from pi is the gradient of KL(pi || ref). No reward is used. arXiv:2306.13649.
"""

from losses.tokens import TokenLoss, Tokens


def distill(tokens: Tokens) -> TokenLoss:
    """Return the loss [N]. The metric reverse_kl [N] = log pi - log ref estimates KL(pi || ref)."""
    if tokens.ref_logprobs is None:
        raise ValueError("loss=distill needs a teacher: use reference=model, endpoint or per_env")
    reverse_kl = (tokens.logprobs - tokens.ref_logprobs).detach()  # [N]
    return TokenLoss(reverse_kl * tokens.logprobs, {"reverse_kl": reverse_kl})
