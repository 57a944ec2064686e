"""The input and output of a token loss, and the importance ratio that all losses share.

    log_ratio = clamp(log pi - log anchor, -20, 20)
    ratio     = exp(log_ratio)

N: completion tokens of a micro-batch, S: its sequences. pi: policy in training, mu: policy that
sampled. anchor: mu, or old (pi before the step's first update) if a batch gets several updates.

Beyond the clamp the ratio is constant, so its gradient is zero. A ratio of e^20 shows a broken
server or a broken update, and its true gradient, 5e8 times the others', would dominate the step. At
e^-20 the lost gradient is negligible. `Tokens.ratio_clamped` tells the objective which tokens were
clamped, for every loss alike.
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
    staleness: Tensor  # [N] int64, version of pi minus version of the policy that sampled
    entropies: Tensor  # [N] entropy of pi before the token, without gradient
    positions: Tensor  # [N] int64, index among its rollout's completion tokens
    turns: Tensor  # [N] int64, index of the assistant turn in its rollout
    old_logprobs: Tensor | None = None  # [N] log pi before the step's first update
    ref_logprobs: Tensor | None = None  # [N] log ref, of the frozen reference or of a teacher
    # The reference's K most likely tokens at each position, if the loss reads these fields:
    candidate_logprobs: Tensor | None = None  # [N, K] log pi, with gradient
    ref_candidate_logprobs: Tensor | None = None  # [N, K] log ref, in falling order

    @staticmethod
    def by_hand(
        logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, **others: Any
    ) -> "Tokens":
        """Return tokens for a table worked by hand: one sequence of one turn, without staleness.

        `others` sets further fields by name.
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
        """Logprobs [N] of the policy in the denominator of the ratio, without gradient."""
        # With old as the anchor, losses/correction.py corrects the difference of old and mu.
        anchor = self.rollout_logprobs if self.old_logprobs is None else self.old_logprobs
        return anchor.detach()

    @property
    def ratio_clamped(self) -> Tensor:
        """1.0 [N] where the ratio to the anchor is clamped and has lost its gradient."""
        difference = self.logprobs.detach() - self.anchor  # [N]
        return (difference.abs() > MAX_LOG_RATIO).float()


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The result of a token loss, before it is weighted, reduced and logged."""

    loss: Tensor  # [N] to be minimised
    metrics: dict[str, Tensor]  # name: [N], or one number for all tokens; without gradient


def log_ratio(anchor: Tensor, logprobs: Tensor) -> Tensor:
    """Return log(pi / anchor) [N], clamped to +-20 with zero gradient beyond."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_to(anchor: Tensor, logprobs: Tensor) -> Tensor:
    """Return pi / anchor [N], within e^+-20."""
    return log_ratio(anchor, logprobs).exp()


def sum_per_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the sum [S] of the values [N] of each sequence; 0 without tokens."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def mean_per_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the mean [S] of the values [N] of each sequence; 0 without tokens."""
    # At least 1, because 0 / 0 of a sequence without tokens is NaN.
    lengths = torch.bincount(sequence_ids, minlength=num_sequences).clamp(min=1)  # [S]
    return sum_per_sequence(values, sequence_ids, num_sequences) / lengths
