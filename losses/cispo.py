"""CISPO: policy gradient weighted by a clipped, detached importance ratio.

    ratio  = pi / anchor                     pi: policy in training, anchor: losses/tokens.py
    loss_t = -stop_gradient(clip(ratio, clip_low, clip_high)) * advantage * log pi

A clipped token keeps a gradient, because only its weight is bounded. The bounds are absolute, not
distances from 1. CISPO: MiniMax-M1, arXiv:2506.13585. Bounds [0, 5]: ScaleRL, arXiv:2510.13786.
"""

from losses.tokens import TokenLoss, Tokens, ratio_to

ORDERED = ("clip_low", "clip_high")  # rl/config/limits.py requires clip_low < clip_high


def cispo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return the loss [N]. The metric clip_fraction [N] is 1 where the weight was clipped."""
    ratio = ratio_to(tokens.anchor, tokens.logprobs.detach())  # [N]
    weight = ratio.clamp(clip_low, clip_high)  # [N]
    loss = -weight * tokens.advantages * tokens.logprobs  # [N]
    return TokenLoss(loss, {"clip_fraction": (weight != ratio).float()}, tokens.ratio_clamped)
