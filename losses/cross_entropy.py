"""Cross entropy: imitate the completion, whatever its source.

    loss_t = -log pi

For supervised fine-tuning on demonstrations, and for distillation from a teacher's text. It uses
neither advantages nor ratios.
"""

from losses.tokens import TokenLoss, Tokens


def cross_entropy(tokens: Tokens) -> TokenLoss:
    """Return the negative log likelihood [N]."""
    return TokenLoss(-tokens.logprobs, {})
