"""The number that is minimised: sum over all completion tokens of token_weight * loss.

The weights come with the batch and were computed over the whole of it (`rl/plan.py`), so the
objective is a plain sum: micro-batches and ranks add up to the same value and gradient however
they were split.

B: rows, T: padded length, N: completion tokens of the micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from losses.tokens import TokenLoss, Tokens
from rl.records import MicroBatch

TokenLossFunction = Callable[[Tokens], TokenLoss]


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch as tensors on the trainer's device."""

    token_ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, True where the policy chose the token
    rollout_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    token_weights: Tensor  # [N]
    token_versions: Tensor  # [N] policy version that sampled the token, -1 if none did
    sequence_ids: Tensor  # [N] row of each token

    @staticmethod
    def of(micro: MicroBatch, device: torch.device) -> "Batch":
        """Move a micro-batch to `device` and flatten its completion tokens, row by row."""
        mask = torch.tensor(micro.completion_mask)
        rows = mask.nonzero()[:, 0]  # [N]
        flat = {
            "rollout_logprobs": torch.tensor(micro.rollout_logprobs)[mask],
            "advantages": torch.tensor(micro.advantages)[rows],
            "token_weights": torch.tensor(micro.token_weights)[rows],
            "token_versions": torch.tensor(micro.token_versions)[mask],
            "sequence_ids": rows,
            "token_ids": torch.tensor(micro.token_ids, dtype=torch.int64),
            "mask": mask,
        }
        return Batch(**{name: tensor.to(device) for name, tensor in flat.items()})


@dataclass(frozen=True)
class Objective:
    """Joins a token loss and the weights of the batch."""

    token_loss: TokenLossFunction

    def __call__(self, batch: Batch, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the objective and metrics [N] without gradient.

        Args:
            batch: the micro-batch.
            logprobs: [N] of its completion tokens under the policy in training.

        """
        tokens = Tokens(
            logprobs=logprobs,
            rollout_logprobs=batch.rollout_logprobs.to(logprobs.dtype),
            advantages=batch.advantages.to(logprobs.dtype),
            sequence_ids=batch.sequence_ids,
            num_sequences=batch.token_ids.shape[0],
        )
        result = self.token_loss(tokens)
        value = (batch.token_weights.to(logprobs.dtype) * result.loss).sum()
        gap = logprobs.detach() - tokens.rollout_logprobs  # [N] log(pi / mu)
        metrics = {
            **result.metrics,
            "ratio_clamped": tokens.ratio_clamped,
            "kl_to_rollout": gap.expm1() - gap,  # k3 estimate of KL(mu || pi)
        }
        return value, metrics
