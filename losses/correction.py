"""Weights that correct the difference between the trainer's and vLLM's probability of a token.

    w_t = exp(log old - log mu)          old: the trainer's own logprob, mu: vLLM's
    w_i = product of w_t over sequence i

    none              1
    tis_token         min(w_t, cap)
    tis_sequence      min(w_i, cap)                                      for every token of i
    icepop            w_t * 1[low <= w_t <= high]
    mis               w_i * 1[low <= w_i <= high]                        for every token of i
    geometric_mask    1[low <= exp(mean over i of log w_t) <= high]      for every token of i

A weight multiplies its token's loss and has no gradient. If the anchor of a loss is mu, its ratio
already corrects the mismatch, and a correction would count the mismatch twice. So corrections need
old as the anchor. A log ratio is clamped to +-20 after summing, far beyond any cap or bound.

N: completion tokens of a micro-batch, S: its sequences, each with all its tokens.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from losses.tokens import MAX_LOG_RATIO, mean_per_sequence, ratio_to, sum_per_sequence

ORDERED = ("low", "high")


@dataclass(frozen=True, eq=False)
class Correction:
    """The result of a correction: a weight for each token's loss, and metrics."""

    weights: Tensor  # [N] factor of each token's loss, without gradient
    metrics: dict[str, Tensor]  # by name: [N], without gradient


def none(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,  # noqa: ARG001 (all corrections share one signature)
    sequence_ids: Tensor,  # noqa: ARG001
    num_sequences: int,  # noqa: ARG001
) -> Correction:
    """Return weight 1 for every token, which leaves the loss unchanged."""
    return Correction(torch.ones_like(old_logprobs), {})


def tis_token(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,  # noqa: ARG001 (all corrections share one signature)
    num_sequences: int,  # noqa: ARG001
    *,
    cap: Annotated[float, Meta(gt=0)],
) -> Correction:
    """Return each token's importance weight, at most `cap`. Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training".
    """
    return _truncated(_token_ratio(old_logprobs, rollout_logprobs), cap)


def tis_sequence(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    cap: Annotated[float, Meta(gt=0)],
) -> Correction:
    """Return each sequence's importance weight, at most `cap`. Its noise grows with the length."""
    product = sum_per_sequence(_gap(old_logprobs, rollout_logprobs), sequence_ids, num_sequences)
    return _truncated(_exp(product)[sequence_ids], cap)


def icepop(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,  # noqa: ARG001 (all corrections share one signature)
    num_sequences: int,  # noqa: ARG001
    *,
    low: Annotated[float, Meta(ge=0)],
    high: float,
) -> Correction:
    """Return each token's importance weight, or 0 outside low..high. IcePop, arXiv:2510.18855."""
    ratio = _token_ratio(old_logprobs, rollout_logprobs)  # [N]
    return _masked(ratio, ratio, low, high)


def mis(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    low: Annotated[float, Meta(ge=0)],
    high: float,
) -> Correction:
    """Return each sequence's importance weight, or 0 outside low..high.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch".
    """
    product = sum_per_sequence(_gap(old_logprobs, rollout_logprobs), sequence_ids, num_sequences)
    ratio = _exp(product)[sequence_ids]  # [N]
    return _masked(ratio, ratio, low, high)


def geometric_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    low: Annotated[float, Meta(ge=0)],
    high: float,
) -> Correction:
    """Return 1 if the geometric mean ratio of a sequence lies in low..high, else 0."""
    mean = mean_per_sequence(_gap(old_logprobs, rollout_logprobs), sequence_ids, num_sequences)
    ratio = _exp(mean)[sequence_ids]  # [N]
    return _masked(torch.ones_like(ratio), ratio, low, high)


def _token_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    return ratio_to(rollout_logprobs.detach(), old_logprobs.detach())  # [N]


def _gap(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    return (old_logprobs - rollout_logprobs).detach()  # [N]


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _truncated(ratio: Tensor, cap: float) -> Correction:
    return Correction(ratio.clamp(max=cap), {"correction_truncated": (ratio > cap).float()})


def _masked(weights: Tensor, ratio: Tensor, low: float, high: float) -> Correction:
    keep = (ratio >= low) & (ratio <= high)  # [N]
    return Correction(weights * keep, {"correction_masked": (~keep).float()})
