"""Define CISPO with a loss that is NaN in some calls, unless REPAIRED is set in the environment."""

import os
from itertools import count

from losses.cispo import cispo
from losses.tokens import TokenLoss, Tokens

FIRST = 4  # number of the first call in a process whose loss is NaN
_CALLS = count()


def nan_once(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return CISPO's loss, NaN in one call."""
    loss = cispo(tokens, clip_low=clip_low, clip_high=clip_high)
    return _spoiled(loss, _number(tokens) == FIRST)


def nan_from_then_on(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return CISPO's loss, NaN from one call on."""
    loss = cispo(tokens, clip_low=clip_low, clip_high=clip_high)
    return _spoiled(loss, _number(tokens) >= FIRST)


def _number(tokens: Tokens) -> int:
    """Count the calls of a process, without those of the dry call, which have at most 8 tokens."""
    return next(_CALLS) if len(tokens.turns) > 8 else -1


def _spoiled(loss: TokenLoss, spoils: bool) -> TokenLoss:
    if not spoils or os.environ.get("REPAIRED"):
        return loss
    return TokenLoss(loss.loss * float("nan"), loss.metrics)
