"""SAPO: a smooth gate on the ratio instead of PPO's clip.

    ratio  = pi / anchor (losses/tokens.py),   tau = tau_positive if A > 0, else tau_negative
    loss_t = -A * sigmoid(tau * (ratio - 1)) * 4 / tau
    gradient with respect to log pi:  -A * ratio * gate,   gate = 4 * s * (1 - s),  s: the sigmoid

At ratio 1 the gate is 1 and the gradient equals PPO's. The gate falls on both sides of 1, faster
for a larger tau. SAPO needs aggregation=sequence_mean, as in its paper. Qwen, arXiv:2511.20347.
"""

import torch

from losses.tokens import TokenLoss, Tokens, ratio_to

PER_SEQUENCE = True  # makes rl/config/algorithm_rules.py require aggregation=sequence_mean


def sapo(tokens: Tokens, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """Return the loss [N]. Metric gate [N]: the gradient divided by PPO's unclipped gradient."""
    advantages = tokens.advantages
    ratio = ratio_to(tokens.anchor, tokens.logprobs)  # [N]
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)  # [N]
    sigmoid = torch.sigmoid(tau * (ratio - 1))  # [N]
    loss = -advantages * sigmoid * 4 / tau  # [N]
    gate = (4 * sigmoid * (1 - sigmoid)).detach()  # [N]
    return TokenLoss(loss, {"gate": gate}, tokens.ratio_clamped)
