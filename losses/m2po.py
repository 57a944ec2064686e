"""M2PO: drop the tokens with the largest |log ratio|, so that the mean square of the rest is small.

    m_t    = (log pi - log anchor)^2        pi, anchor: losses/tokens.py, A: advantage
    bound  = the largest b for which the m_t below b in the batch have a mean <= max_second_moment
    loss_t = -1[m_t < bound] * ratio * A

If tokens are stale, PPO's clip masks many of them, but this bound masks only outliers. The tokens
are counted in bins of |log ratio|, so the square root of the bound is a multiple of a bin's width.
arXiv:2510.01161. K: twice the number of bins.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from losses.tokens import MAX_LOG_RATIO, TokenLoss, Tokens, log_ratio

_WIDTH = 0.01  # width of a bin of |log ratio|
_NUM_BINS = round(MAX_LOG_RATIO / _WIDTH) + 1  # the last bin counts clamped ratios


@dataclass(frozen=True, kw_only=True)
class M2PO:
    """The loss M2PO, whose bound depends on the global batch (rl/learner/batch_statistics.py)."""

    max_second_moment: Annotated[float, Meta(gt=0)]

    def statistics(self, tokens: Tokens) -> Tensor:
        """Return [K]: the number of tokens in each bin, then the sum of m_t in each bin."""
        squares = log_ratio(tokens.anchor, tokens.logprobs).square().double()  # [N]
        counted = torch.stack([torch.ones_like(squares), squares])  # [2, N]
        return counted.new_zeros(2, _NUM_BINS).index_add(1, _bins(tokens), counted).flatten()

    def __call__(self, tokens: Tokens, statistics: Tensor) -> TokenLoss:
        """Return the masked surrogate [N]. `statistics` [K] are sums over the global batch."""
        counts, sums = statistics.view(2, _NUM_BINS).cumsum(1)
        # The mean of m_t over the first k bins never falls as k grows, so the kept bins come first.
        num_kept_bins = (sums <= self.max_second_moment * counts).sum()
        kept = (_bins(tokens) < num_kept_bins).to(tokens.logprobs.dtype)  # [N]
        ratio = log_ratio(tokens.anchor, tokens.logprobs).exp()  # [N]
        loss = -kept * ratio * tokens.advantages  # [N]
        return TokenLoss(loss, {"masked_fraction": 1 - kept}, tokens.ratio_clamped)


def _bins(tokens: Tokens) -> Tensor:
    distances = log_ratio(tokens.anchor, tokens.logprobs.detach()).abs()  # [N]
    return (distances.nan_to_num(MAX_LOG_RATIO) / _WIDTH).long()  # NaN counts in the last bin
