"""PPO's clipped surrogate on the tokens with the highest entropy, and 0 on all other tokens.

    loss_t = ppo_clip_t * 1[entropy_t is among the `fraction` highest of its sequence]

"Beyond the 80/20 Rule", arXiv:2506.01939, finds that training only on the tokens with the highest
entropy is at least as good as training on all. The paper ranks all tokens of a batch together. This
loss ranks the tokens of each sequence, so the split into micro-batches has no effect. Ties with the
lowest kept entropy are kept, too. The aggregation also counts the tokens whose loss is 0.
"""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from losses.ppo_clip import ppo_clip
from losses.tokens import TokenLoss, Tokens


def top_entropy(
    tokens: Tokens,
    *,
    fraction: Annotated[float, Meta(gt=0, le=1)],
    clip_low: float,
    clip_high: float,
    dual_clip: Annotated[float, Meta(gt=1)] | None,
) -> TokenLoss:
    """Return the clipped surrogate [N] and metric kept_fraction [N], both 0 at dropped tokens."""
    surrogate = ppo_clip(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    kept = is_highest(tokens.entropies, tokens.sequence_ids, tokens.num_sequences, fraction).to(
        surrogate.loss.dtype
    )
    metrics = {name: values * kept for name, values in surrogate.metrics.items()}
    clamped = tokens.ratio_clamped * kept
    return TokenLoss(surrogate.loss * kept, {"kept_fraction": kept, **metrics}, clamped)


def is_highest(values: Tensor, sequence_ids: Tensor, num_sequences: int, fraction: float) -> Tensor:
    """Return a mask [N] of each sequence's ceil(fraction * length) highest values, and of ties."""
    if not len(values):
        return torch.zeros_like(values, dtype=torch.bool)
    lengths = torch.bincount(sequence_ids, minlength=num_sequences)  # [S]
    # Two stable sorts order the values by sequence, and by descending value in each sequence.
    order = values.argsort(descending=True, stable=True)
    order = order[sequence_ids[order].argsort(stable=True)]  # [N]
    ends = lengths.cumsum(0)  # [S]
    # Subtract 1e-9, so that rounding errors do not raise the result of `ceil`.
    counts = (lengths.double() * fraction - 1e-9).ceil().long()  # [S]
    lowest = ends - lengths + counts - 1  # [S] index of the lowest kept value in `order`
    return values >= values[order][lowest][sequence_ids]
