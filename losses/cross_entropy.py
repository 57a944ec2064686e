"""Cross entropy: the policy imitates the completions.

    loss_t = -log pi

The loss is for supervised fine-tuning on demonstrations, and for distillation from a teacher's
text. It uses neither advantages nor ratios.
"""

from losses.tokens import TokenLoss, Tokens


def cross_entropy(tokens: Tokens) -> TokenLoss:
    """Return the negative log likelihood [N] of the completion tokens."""
    return TokenLoss(-tokens.logprobs, {})
