"""Cross entropy: imitate the completion, whoever wrote it.

    loss_t = -log pi

Supervised fine-tuning on demonstrations, and distillation from a teacher's text. Advantages and
ratios play no part.
"""

from losses.tokens import TokenLoss, Tokens


def cross_entropy(tokens: Tokens) -> TokenLoss:
    """Negative log likelihood [N]."""
    return TokenLoss(-tokens.logprobs, {})
