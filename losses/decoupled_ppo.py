"""Decoupled PPO with an anchor that follows the policy the further, the staler the token is.

    log prox = (1 - a) * log mu + a * sg(log pi)               a = staleness / (staleness + 1)
    r        = pi / prox
    w        = sg(min(prox / mu, weight_cap))
    loss_t   = w * max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))

PPO bounds how far pi moves from the policy that sampled. Where that lies several versions back the
bound keeps a token from learning anything. Decoupled PPO (AReaL, arXiv:2505.24298) bounds the step
from a proximal policy, the one before the update, and corrects for mu by the weight in front. Its
logprobs would take a pass of their own; on the way from mu to pi, `staleness` of the
`staleness + 1` steps lie before it, and a line through the logprobs stands in for it: A-3PO,
arXiv:2512.06547. With staleness 0 this is PPO's clip. Where a batch is updated several times the
proximal policy's logprobs are there, and taken. AReaL's code leaves out a token whose weight is
above its cap; here it counts by the cap, as under truncated importance sampling.
"""

import torch

from losses.tokens import TokenLoss, Tokens, ratio_to

RANGES = {"weight_cap": "> 0"}
CORRECTS = True  # for what lies between mu and the anchor: a correction would do so twice


def decoupled_ppo(
    tokens: Tokens, *, clip_low: float, clip_high: float, weight_cap: float
) -> TokenLoss:
    """Clipped surrogate [N], weighted by at most `weight_cap`; metrics count what was bounded."""
    mu, pi = tokens.rollout_logprobs, tokens.logprobs.detach()  # [N]
    proximal = tokens.old_logprobs  # [N]
    if proximal is None:
        follows = (tokens.staleness / (tokens.staleness + 1)).to(pi.dtype)  # [N]
        proximal = mu + follows * (pi - mu)  # [N]
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
    return TokenLoss(loss, metrics)
