"""What a token loss sees and returns, and the importance ratio they all share.

    log_ratio = clamp(log pi - log anchor, -20, 20)
    ratio     = exp(log_ratio)

N: completion tokens of a micro-batch, S: its sequences. pi: policy in training, mu: policy that
sampled, anchor: mu, or old (pi before the step's first update) when one batch gets several
updates.

Beyond the clamp the ratio is a constant, so its gradient is zero. A token whose probability moved
by e^20 shows a broken server or a broken update, not something to learn: its true gradient, 5e8
times the others', would be the whole step; at the other end, 2e-9, nothing is lost. The objective
counts such tokens once for every loss, in `Tokens.ratio_clamped`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class Tokens:
    """The completion tokens of a micro-batch, flattened: no padding, no masks."""

    logprobs: Tensor  # [N] log pi; it and candidate_logprobs alone carry a gradient
    rollout_logprobs: Tensor  # [N] log mu, as vLLM reported it at sampling
    advantages: Tensor  # [N]
    sequence_ids: Tensor  # [N] int64 in 0..num_sequences-1, in any order
    num_sequences: int  # S; a sequence may have no token here
    staleness: Tensor  # [N] int64, versions that its sampler lay behind the policy in training
    entropies: Tensor  # [N] of the policy in training where it chose the token, without gradient
    positions: Tensor  # [N] int64, place among its rollout's completion tokens, from 0
    turns: Tensor  # [N] int64, assistant turn of its rollout, from 0
    old_logprobs: Tensor | None = None  # [N] log pi before the step's first update
    ref_logprobs: Tensor | None = None  # [N] of the frozen reference, or of a teacher
    # Of the reference's K most likely tokens at each place, for a loss that reads these fields:
    candidate_logprobs: Tensor | None = None  # [N, K] log pi, with gradient
    ref_candidate_logprobs: Tensor | None = None  # [N, K] of the reference, falling

    @staticmethod
    def by_hand(
        logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, **others: Any
    ) -> "Tokens":
        """Tokens for a table worked by hand: one sequence of one turn, none of it stale.

        Whatever else matters is given by its name.
        """
        zeros = torch.zeros(len(logprobs), dtype=torch.int64)
        tokens = {
            "sequence_ids": zeros,
            "num_sequences": 1,
            "staleness": zeros,
            "entropies": torch.zeros_like(rollout_logprobs),
            "positions": torch.arange(len(logprobs)),
            "turns": zeros,
        }
        return Tokens(logprobs, rollout_logprobs, advantages, **(tokens | others))

    @property
    def anchor(self) -> Tensor:
        """Logprobs [N] of the policy that ratios are taken to, without gradient."""
        # With old at hand, how far it is from mu is no longer the ratio's business but a
        # correction's (losses/correction.py).
        anchor = self.rollout_logprobs if self.old_logprobs is None else self.old_logprobs
        return anchor.detach()

    @property
    def ratio_clamped(self) -> Tensor:
        """1.0 [N] where the ratio to the anchor is clamped and has lost its gradient."""
        difference = self.logprobs.detach() - self.anchor  # [N]
        return (difference.abs() > MAX_LOG_RATIO).float()


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """What a token loss returns: nothing is reduced, weighted or logged yet."""

    loss: Tensor  # [N] to be minimised
    metrics: dict[str, Tensor]  # name: [N], or one number for all of them; without gradient


def log_ratio(anchor: Tensor, logprobs: Tensor) -> Tensor:
    """log(pi / anchor) [N], clamped to +-20 with zero gradient beyond."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_to(anchor: Tensor, logprobs: Tensor) -> Tensor:
    """pi / anchor [N], within e^+-20."""
    return log_ratio(anchor, logprobs).exp()


def sum_per_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Sum [S] of the values [N] of each sequence; 0 for a sequence without tokens."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def mean_per_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Mean [S] of the values [N] of each sequence; 0 for a sequence without tokens."""
    # At least 1, for 0 / 0 of a sequence without tokens would be NaN.
    lengths = torch.bincount(sequence_ids, minlength=num_sequences).clamp(min=1)  # [S]
    return sum_per_sequence(values, sequence_ids, num_sequences) / lengths
