"""A loss with a fault: CISPO, but tokens that an older policy version sampled get the wrong sign.

    cd tests/lab/sweeps/stale_fault
    python ../../../../train.py --config-dir sweeps --config-name report_card \\
        loss=stale_fault row=staleness
"""

import torch

from losses.cispo import cispo
from losses.tokens import TokenLoss, Tokens


def stale_fault(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return CISPO's loss [N], multiplied by -1 where the staleness is above 0."""
    right = cispo(tokens, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(torch.where(tokens.staleness > 0, -right.loss, right.loss), right.metrics)
