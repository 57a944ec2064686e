"""REINFORCE: the score function estimator, without a ratio.

    loss_t = -A * log pi

The gradient is unbiased only for tokens sampled from pi itself, because nothing corrects for older
policies. RLOO is this loss with the leave-one-out advantage. Williams 1992; arXiv:2402.14740.
"""

from losses.tokens import TokenLoss, Tokens


def reinforce(tokens: Tokens) -> TokenLoss:
    """Return the loss -advantage * log pi [N]."""
    return TokenLoss(-tokens.advantages * tokens.logprobs, {})
