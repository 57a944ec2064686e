"""Focal policy gradient: a token that the policy was sure of anyway weighs little.

    ratio  = pi / anchor                  pi: policy in training, anchor: policy that sampled
    focus  = (1 - pi) ** gamma            near 0: nothing was decided here; near 1: much was
    loss_t = -stop_gradient(focus * min(ratio, ratio_cap)) * advantage * log pi

The idea: of the forty tokens of a tool call one is a choice and the rest is JSON. They share the
episode's advantage all the same, so let those that chose have more of it. Focal loss
(arXiv:1708.02002) does this to classifiers. gamma=0 is CISPO without a lower bound.
"""

from losses.tokens import TokenLoss, Tokens, ratio_to


def focal(tokens: Tokens, *, gamma: float, ratio_cap: float) -> TokenLoss:
    """Focal loss [N]; train/focus says how much of the gradient is left on average."""
    ratio = ratio_to(tokens.anchor, tokens.logprobs.detach())  # [N]
    # Rounding can lift pi above 1, and a power of a negative number is NaN.
    focus = (1 - tokens.logprobs.detach().exp()).clamp(min=0) ** gamma  # [N]
    loss = -focus * ratio.clamp(max=ratio_cap) * tokens.advantages * tokens.logprobs  # [N]
    return TokenLoss(loss, {"focus": focus})
