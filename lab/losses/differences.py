"""Compare the gradients of two losses by log pi of the same tokens.

cosine    cosine of the two gradients, over all recorded tokens of the compared steps
norm      norm of the gradient, as a ratio to the norm of the first loss
agree     share of tokens that both losses move in the same direction, of the tokens that one moves
opposite  share of tokens that they move in opposite directions
only_base, only_arm   share of tokens that only the first, or only the second, loss moves
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The comparison of an arm with the first arm."""

    objective: float  # mean over the updates
    cosine: float
    norm: float
    agree: float
    opposite: float
    only_base: float
    only_arm: float


def difference(base: Tensor, arm: Tensor, objective: float) -> Difference:
    """Compare two gradients [N] of the same tokens. NaN where both, or one, have no gradient."""
    base, arm = base.double(), arm.double()
    norms = base.norm(), arm.norm()
    moved = ((base != 0) | (arm != 0)).sum()

    def share(mask: Tensor) -> float:
        return (mask.sum() / moved).item()

    return Difference(
        objective=objective,
        cosine=(base @ arm / (norms[0] * norms[1])).item(),
        norm=(norms[1] / norms[0]).item(),
        agree=share(base * arm > 0),
        opposite=share(base * arm < 0),
        only_base=share((base != 0) & (arm == 0)),
        only_arm=share((base == 0) & (arm != 0)),
    )


def largest(base: Sequence[Tensor], arm: Sequence[Tensor], count: int) -> list[tuple[int, int]]:
    """Return the `count` tokens whose two gradients differ most: (index of batch, of token)."""
    gaps = [(a - b).abs() for a, b in zip(arm, base, strict=True)]  # by batch
    places = [(number, i) for number, gap in enumerate(gaps) for i in range(len(gap))]
    order = torch.cat(gaps).argsort(descending=True, stable=True)[:count]
    return [places[i] for i in order.tolist()]
