"""The loss of a critic: half the squared distance of its values from the returns.

    loss = (V - R)^2 / 2
    with clip:  loss = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2

V_old is the value before the step's first update. A V that moved by more than clip has a gradient
only if the clipped value is nearer to R than V is. clip is in units of the return. Implementations
of PPO use this clip, but the paper (arXiv:1707.06347) does not.
"""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from losses.tokens import TokenLoss


def squared_error(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    *,
    clip: Annotated[float, Meta(gt=0)] | None,
) -> TokenLoss:
    """Return the loss [N] of values [N]. A metric marks values that moved by more than clip."""
    error = (values - returns).square()  # [N]
    if clip is None:
        return TokenLoss(error / 2, {})
    moved = values - old_values  # [N]
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()  # [N]
    beyond = (moved.detach().abs() > clip).float()  # [N]
    return TokenLoss(torch.maximum(error, clipped) / 2, {"value_clip_fraction": beyond})
