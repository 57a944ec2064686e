"""Weights that correct for the difference between the trainer's and vLLM's probability of a token.

    w_t = old / mu       old: the trainer's probability before the first update, mu: vLLM's
    w_i = product of w_t over sequence i

    none              1
    tis_token         min(w_t, cap)
    tis_sequence      min(w_i, cap)                                      for every token of i
    icepop            w_t * 1[low <= w_t <= high]
    mis               w_i * 1[low <= w_i <= high]                        for every token of i
    geometric_mask    1[low <= exp(mean over i of log w_t) <= high]      for every token of i

A weight multiplies its token's loss and has no gradient. Corrections apply only if a batch gets
several updates, because the ratio of a loss is then pi / old. With one update the ratio is pi / mu,
which corrects for the difference. Log ratios are clamped to +-20, and e^20 exceeds any useful cap.

N: completion tokens of a micro-batch, S: its sequences, which are never split.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from losses.tokens import (
    MAX_LOG_RATIO,
    Tokens,
    mean_per_sequence,
    require_per_token,
    sum_per_sequence,
)

ORDERED = ("low", "high")  # rl/config/limits.py requires low < high


@dataclass(frozen=True, eq=False)
class Correction:
    """The weights that a correction gives to the tokens, and its metrics."""

    weights: Tensor  # [N] multiplies each token's loss, without gradient
    metrics: dict[str, Tensor]  # name -> [N] or one number for all tokens, without gradient

    def __post_init__(self) -> None:
        require_per_token("weights", self.weights, self.metrics)


def none(tokens: Tokens) -> Correction:
    """Return weight 1 for every token."""
    return Correction(torch.ones_like(tokens.anchor), {})


def tis_token(tokens: Tokens, *, cap: Annotated[float, Meta(gt=0)]) -> Correction:
    """Return each token's importance weight, at most `cap`. Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training".
    """
    return _truncate(_clamped_exp(_log_w(tokens)), cap)


def tis_sequence(tokens: Tokens, *, cap: Annotated[float, Meta(gt=0)]) -> Correction:
    """Return each sequence's importance weight, at most `cap`. It is noisy for long sequences."""
    product = sum_per_sequence(_log_w(tokens), tokens.sequence_ids, tokens.num_sequences)
    return _truncate(_clamped_exp(product)[tokens.sequence_ids], cap)


def icepop(tokens: Tokens, *, low: Annotated[float, Meta(ge=0)], high: float) -> Correction:
    """Return each token's importance weight, or 0 outside low..high. IcePop, arXiv:2510.18855."""
    ratio = _clamped_exp(_log_w(tokens))  # [N]
    return _mask_outside(ratio, ratio, low, high)


def mis(tokens: Tokens, *, low: Annotated[float, Meta(ge=0)], high: float) -> Correction:
    """Return each sequence's importance weight, or 0 outside low..high.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch".
    """
    product = sum_per_sequence(_log_w(tokens), tokens.sequence_ids, tokens.num_sequences)
    ratio = _clamped_exp(product)[tokens.sequence_ids]  # [N]
    return _mask_outside(ratio, ratio, low, high)


def geometric_mask(tokens: Tokens, *, low: Annotated[float, Meta(ge=0)], high: float) -> Correction:
    """Return weight 1 if a sequence's geometric mean ratio is in low..high, else weight 0."""
    mean = mean_per_sequence(_log_w(tokens), tokens.sequence_ids, tokens.num_sequences)
    ratio = _clamped_exp(mean)[tokens.sequence_ids]  # [N]
    return _mask_outside(torch.ones_like(ratio), ratio, low, high)


def _log_w(tokens: Tokens) -> Tensor:
    return (tokens.anchor - tokens.rollout_logprobs).detach()  # [N] log old - log mu


def _clamped_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _truncate(ratio: Tensor, cap: float) -> Correction:
    return Correction(ratio.clamp(max=cap), {"correction_truncated": (ratio > cap).float()})


def _mask_outside(weights: Tensor, ratio: Tensor, low: float, high: float) -> Correction:
    keep = (ratio >= low) & (ratio <= high)  # [N]
    return Correction(weights * keep, {"correction_masked": (~keep).float()})
