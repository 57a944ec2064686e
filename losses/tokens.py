"""The input and output of a token loss, and the importance ratio that most losses use.

    log_ratio = clamp(log pi - log anchor, -20, 20)
    ratio     = exp(log_ratio)

N: completion tokens of a micro-batch, S: its sequences (rows). pi: policy in training, mu: policy
that sampled. anchor: mu, or old (pi before the step's first update) if a batch has several updates.

Beyond the clamp the ratio is constant, so its gradient is zero. A ratio of e^20 shows a broken
server or a broken update, and its true gradient, 5e8 times that of other tokens, would dominate the
step. At e^-20 the lost gradient is negligible.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class Tokens:
    """The completion tokens of a micro-batch as flat tensors, without padding."""

    logprobs: Tensor  # [N] log pi. Only this field and candidate_logprobs have a gradient
    rollout_logprobs: Tensor  # [N] log mu, reported by vLLM at sampling
    advantages: Tensor  # [N]
    sequence_ids: Tensor  # [N] int64, index of each token's sequence, in any order
    num_sequences: int  # S, including sequences without completion tokens
    staleness: Tensor  # [N] int64, version of pi minus version of mu
    entropies: Tensor  # [N] entropy of pi at the token's position, without gradient
    positions: Tensor  # [N] int64, index of the token among its rollout's completion tokens
    turns: Tensor  # [N] int64, index of the token's assistant turn in its rollout
    rollout_ids: Tensor  # [N] int64, index of the token's rollout in the global batch
    group_ids: Tensor  # [N] int64, number that identifies the token's group and role
    source: Tensor  # [N] int64, the `Source` of the token's rollout (losses/groups.py)
    old_logprobs: Tensor | None = None  # [N] log pi before the step's first update
    ref_logprobs: Tensor | None = None  # [N] logprobs under the reference or the teacher
    # KL(uniform || pi) over the vocabulary, or None if the loss does not read it:
    kl_from_uniform: Tensor | None = None  # [N] without gradient
    # Logprobs of the reference's K most likely tokens, or None if the loss does not use them:
    candidate_logprobs: Tensor | None = None  # [N, K] log pi, with gradient
    ref_candidate_logprobs: Tensor | None = None  # [N, K] log ref, in descending order

    @staticmethod
    def by_hand(
        logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, **others: Any
    ) -> "Tokens":
        """Return tokens of one sequence with one turn, staleness 0 and source POLICY, for tests."""
        zeros = torch.zeros(len(logprobs), dtype=torch.int64)
        tokens = {
            "sequence_ids": zeros,
            "num_sequences": 1,
            "staleness": zeros,
            "entropies": torch.zeros_like(rollout_logprobs),
            "positions": torch.arange(len(logprobs)),
            "turns": zeros,
            "rollout_ids": others.get("sequence_ids", zeros),
            "group_ids": zeros,
            "source": zeros,
        }
        return Tokens(logprobs, rollout_logprobs, advantages, **(tokens | others))

    @property
    def anchor(self) -> Tensor:
        """Logprobs [N] of the policy in the denominator of the ratio, without gradient."""
        # If old is the anchor, a correction can correct for the difference between old and mu.
        anchor = self.rollout_logprobs if self.old_logprobs is None else self.old_logprobs
        return anchor.detach()

    @property
    def ratio_clamped(self) -> Tensor:
        """A float mask [N], 1.0 where the ratio to the anchor is clamped and has no gradient."""
        return is_clamped(self.logprobs - self.anchor)


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """The loss and the metrics of each token, before they are weighted and summed."""

    loss: Tensor  # [N]
    metrics: dict[str, Tensor]  # name -> [N] or one number for all tokens, without gradient
    # [N] 1.0 where the loss clamped its log ratio, or None if the loss uses no ratio. Most losses
    # set this field to Tokens.ratio_clamped.
    ratio_clamped: Tensor | None = None

    def __post_init__(self) -> None:
        require_per_token("loss", self.loss, self.metrics)
        if self.ratio_clamped is not None:
            require_per_token("loss", self.loss, {"ratio_clamped": self.ratio_clamped})


def require_per_token(name: str, values: Any, metrics: Any) -> None:
    """Raise TypeError unless values is a tensor [N] and metrics a dict of tensors [N] or scalar."""
    if not isinstance(values, Tensor) or values.dim() != 1:
        given = f"{name} is {describe(values)}"
        raise TypeError(f"{given}: give a tensor [N], neither summed nor averaged over tokens")
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is {describe(metrics)}: give a dict, which may be empty")
    for key, metric in metrics.items():
        if not isinstance(metric, Tensor) or metric.shape not in ((), (1,), values.shape):
            given = f"the metric {key!r} is {describe(metric)}"
            raise TypeError(f"{given}: give a tensor with one number per token, or one for all")


def describe(value: Any) -> str:
    """Return the words by which an error message describes a component's wrong result."""
    if isinstance(value, Tensor):
        return f"a Tensor of shape {list(value.shape)}"
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, int | float | str) else f"a {kind}"


def is_clamped(log_ratios: Tensor) -> Tensor:
    """Return a float mask, 1.0 where a log ratio exceeds the clamp and has no gradient."""
    return (log_ratios.detach().abs() > MAX_LOG_RATIO).float()


def log_ratio(anchor: Tensor, logprobs: Tensor) -> Tensor:
    """Return log(pi / anchor) [N], clamped to +-20. The gradient beyond the clamp is zero."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_to(anchor: Tensor, logprobs: Tensor) -> Tensor:
    """Return the ratio pi / anchor [N], clamped to e^-20..e^20."""
    return log_ratio(anchor, logprobs).exp()


def sum_per_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the sum [S] of the values [N] of each sequence, 0 for a sequence without tokens."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def mean_per_sequence(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return the mean [S] of the values [N] of each sequence, 0 for a sequence without tokens."""
    lengths = torch.bincount(sequence_ids, minlength=num_sequences).clamp(min=1)  # [S]
    return sum_per_sequence(values, sequence_ids, num_sequences) / lengths
