"""Generalised advantage estimation: discounted sums of temporal differences along a rollout.

    delta_l = r_l + gamma * V_(l+1) - V_l
    A_l     = delta_l + gamma * gae_lambda * A_(l+1)        after the last step V and A are 0

With gae_lambda 1 an advantage is the return minus the value. It is unbiased for any values, and as
noisy as the returns. With gae_lambda 0 an advantage is one delta, which has little noise and the
full bias of the values. arXiv:1506.02438.

R: rollouts, L: number of steps of the longest rollout. Steps are tokens or turns (conf/critic).
"""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: Annotated[float, Meta(ge=0, le=1)],
    gae_lambda: Annotated[float, Meta(ge=0, le=1)],
) -> Tensor:
    """Return advantages [R, L]. The rewards [R, L] and values [R, L] must be 0 at padding."""
    advantages = torch.empty_like(values)
    next_value = next_advantage = values.new_zeros(len(values))  # [R]
    for step in reversed(range(values.shape[1])):
        delta = rewards[:, step] + gamma * next_value - values[:, step]
        next_advantage = delta + gamma * gae_lambda * next_advantage
        next_value = values[:, step]
        advantages[:, step] = next_advantage
    return advantages
