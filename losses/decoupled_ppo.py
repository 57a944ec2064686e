"""Decoupled PPO: bound the distance of pi from a proximal policy, which is between mu and pi.

    log prox = (1 - a) * log mu + a * sg(log pi)       a = staleness / (staleness + 1)
    r        = pi / prox                               prox: proximal policy, sg: without gradient
    w        = sg(min(prox / mu, weight_cap))
    loss_t   = w * max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))

PPO bounds the distance of pi from mu, the policy that sampled. If mu is several versions old, many
tokens are beyond the bound and have no gradient. Decoupled PPO (AReaL, arXiv:2505.24298) bounds the
distance from a proximal policy, which is the policy before the update, and corrects for mu by the
weight w. The logprobs of the proximal policy would need another forward pass. So this loss, like
A-3PO (arXiv:2512.06547), interpolates between log mu and log pi. The weight of log mu, 1 - a, is
1 / (staleness + 1), as in AReaL's code, but 1 / staleness in A-3PO's paper. With staleness 0 the
loss is PPO's clip. If a batch gets several updates, prox is pi before the first of them. If
prox / mu exceeds weight_cap, AReaL's code drops the token. Here its weight is weight_cap.
"""

from typing import Annotated

import torch
from msgspec import Meta

from losses.tokens import TokenLoss, Tokens, is_clamped, ratio_to


def decoupled_ppo(
    tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: Annotated[float, Meta(gt=0)]
) -> TokenLoss:
    """Return the loss [N]. Metrics: prox / mu, and masks of clipped ratios and capped weights."""
    mu, pi = tokens.rollout_logprobs, tokens.logprobs.detach()  # [N]
    proximal = tokens.old_logprobs  # [N]
    if proximal is None:
        share = (tokens.staleness / (tokens.staleness + 1)).to(pi.dtype)  # [N] a in the formula
        proximal = mu + share * (pi - mu)  # [N]
    weight = ratio_to(mu, proximal)  # [N]
    bounded = weight.clamp(max=weight_cap)  # [N]
    ratio = ratio_to(proximal, tokens.logprobs)  # [N]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)  # [N]
    advantages = tokens.advantages
    loss = bounded * torch.maximum(-advantages * ratio, -advantages * clipped)  # [N]
    low = (advantages < 0) & (ratio < 1 - clip_low)  # [N]
    high = (advantages > 0) & (ratio > 1 + clip_high)  # [N]
    metrics = {
        "clip_fraction": (low | high).float(),
        "proximal_weight": weight,
        "weight_capped": (weight > weight_cap).float(),
    }
    return TokenLoss(loss, metrics, is_clamped(pi - proximal))
