"""PPO's clipped surrogate on the tokens at which the policy was least certain, and on no others.

    loss_t = ppo_clip_t * 1[entropy_t is among the `fraction` highest of its sequence]

Most tokens of a chain of thought continue what was decided; a few decide. Learning from the latter
alone does as well or better: "Beyond the 80/20 Rule", arXiv:2506.01939. The paper compares the
tokens of a whole batch; here those of a sequence are compared, so that how a batch is split changes
nothing. Tokens that tie with the last one in are in. Those left out keep their place in the
aggregation's denominator.
"""

import torch
from torch import Tensor

from losses.ppo_clip import ppo_clip
from losses.tokens import TokenLoss, Tokens

ABOVE_ONE = ("dual_clip",)
RANGES = {"fraction": "> 0 and <= 1"}


def top_entropy(
    tokens: Tokens,
    *,
    fraction: float,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """Clipped surrogate [N], 0 at the tokens left out; kept_fraction counts the others."""
    surrogate = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    kept = highest(tokens.entropies, tokens.sequence_ids, tokens.num_sequences, fraction).to(
        surrogate.loss.dtype
    )
    metrics = {name: values * kept for name, values in surrogate.metrics.items()}
    return TokenLoss(surrogate.loss * kept, {"kept_fraction": kept, **metrics})


def highest(values: Tensor, sequence_ids: Tensor, num_sequences: int, fraction: float) -> Tensor:
    """True [N] for the ceil(fraction * length) highest values [N] of each sequence, and ties."""
    if not len(values):
        return torch.zeros_like(values, dtype=torch.bool)
    lengths = torch.bincount(sequence_ids, minlength=num_sequences)  # [S]
    # By sequence, within it from high to low: of two stable sorts the last one rules.
    order = values.argsort(descending=True, stable=True)
    order = order[sequence_ids[order].argsort(stable=True)]  # [N]
    ends = lengths.cumsum(0)  # [S]
    counts = (lengths.double() * fraction - 1e-9).ceil().long()  # [S] 0.2 of 15 is 3, not 4
    lowest = ends - lengths + counts - 1  # [S] the last one in; of a sequence without tokens: any
    return values >= values[order][lowest][sequence_ids]
