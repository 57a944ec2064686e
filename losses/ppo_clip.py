"""PPO's clipped surrogate, token by token. GRPO, DAPO and Dr.GRPO use this loss.

    ratio  = pi / anchor        pi, anchor: losses/tokens.py, A: advantage
    loss_t = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
    with dual_clip, if A < 0:  loss_t = min(loss_t, -A * dual_clip)

A clipped token has no gradient. Without dual_clip the gradient of a token with A < 0 grows with its
ratio without limit. With dual_clip (> 1) that gradient is 0 if the ratio exceeds dual_clip.
clip_low and clip_high are distances of the bounds from 1. arXiv:1707.06347. Unequal bounds: DAPO,
arXiv:2503.14476. Dual clip: arXiv:1912.09729.
"""

from typing import Annotated

import torch
from msgspec import Meta

from losses.tokens import TokenLoss, Tokens, ratio_to


def ppo_clip(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: Annotated[float, Meta(gt=1)] | None,
) -> TokenLoss:
    """Return the clipped surrogate [N]. Metrics mark clipped tokens, all together and by bound."""
    advantages = tokens.advantages
    ratio = ratio_to(tokens.anchor, tokens.logprobs)  # [N]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)  # [N]
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)  # [N]
    low = (advantages < 0) & (ratio < 1 - clip_low)  # [N]
    high = (advantages > 0) & (ratio > 1 + clip_high)  # [N]
    metrics = {"clip_fraction_low": low.float(), "clip_fraction_high": high.float()}
    clip = low | high  # [N]
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)  # [N]
        bounded = torch.minimum(loss, -advantages * dual_clip)  # [N]
        loss = torch.where(advantages < 0, bounded, loss)  # [N]
        metrics["clip_fraction_dual"] = dual.float()
        clip = clip | dual
    return TokenLoss(loss, {"clip_fraction": clip.float(), **metrics}, tokens.ratio_clamped)
