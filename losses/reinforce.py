"""REINFORCE: the score function estimator, without a ratio.

    loss_t = -A * log pi

Unbiased only for tokens sampled from pi itself; what older policies sampled counts as if it were
on-policy. RLOO is this loss with the leave-one-out advantage. Williams 1992; arXiv:2402.14740.
"""

from losses.tokens import TokenLoss, Tokens


def reinforce(tokens: Tokens) -> TokenLoss:
    """Score function loss [N]."""
    return TokenLoss(-tokens.advantages * tokens.logprobs, {})
