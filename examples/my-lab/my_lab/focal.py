"""Focal policy gradient: tokens of which the policy was sure have a small weight.

    ratio  = pi / anchor                  pi: policy in training, anchor: policy that sampled
    focus  = (1 - pi) ** gamma            near 0: the policy was sure; near 1: it was not
    loss_t = -stop_gradient(focus * min(ratio, ratio_cap)) * advantage * log pi

One of the forty tokens of a tool call may be a choice, and the others are JSON. All tokens get the
same advantage, so this loss gives more weight to the choices. Focal loss (arXiv:1708.02002)
does this for classifiers. gamma=0 is CISPO without a lower bound.
"""

from losses.tokens import TokenLoss, Tokens, ratio_to


def focal(tokens: Tokens, *, gamma: float, ratio_cap: float) -> TokenLoss:
    """Return the loss [N]; focus [N] is the share of the gradient that is left."""
    ratio = ratio_to(tokens.anchor, tokens.logprobs.detach())  # [N]
    # Clamp, because rounding can make pi exceed 1, and a power of a negative number is NaN.
    focus = (1 - tokens.logprobs.detach().exp()).clamp(min=0) ** gamma  # [N]
    loss = -focus * ratio.clamp(max=ratio_cap) * tokens.advantages * tokens.logprobs  # [N]
    return TokenLoss(loss, {"focus": focus})
