"""The number that is minimised, over all completion tokens of the global batch:

    sum of  token_weight * (correction * loss + beta * kl - entropy_bonus * entropy)

The weights come with the batch and were computed over the whole of it (rl/rollouts/plan.py), so
objective is a plain sum: micro-batches and ranks add up to the same value and gradient however
they were split.

B: rows, T: padded length, N: completion tokens of the micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from losses.tokens import TokenLoss, Tokens, log_ratio
from rl.learner.kl import KLPenalty
from rl.learner.value_credit import ValueTargets
from rl.records import MicroBatch

TokenLossFunction = Callable[[Tokens], TokenLoss]


class Weighted(Protocol):
    """What a correction returns (losses/correction.py)."""

    @property
    def weights(self) -> Tensor:
        """Factor [N] of each token's loss."""
        ...

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Metrics [N]."""
        ...


CorrectionFunction = Callable[[Tensor, Tensor, Tensor, int], Weighted]
"""(old_logprobs [N], rollout_logprobs [N], sequence_ids [N], number of sequences)"""


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch as tensors on the trainer's device."""

    token_ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, True where the policy chose the token
    rollout_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    token_weights: Tensor  # [N]
    staleness: Tensor  # [N] versions behind the policy in training; step + 1 if none sampled it
    sequence_ids: Tensor  # [N] row of each token
    rollout_ids: Tensor  # [N] rollout of each token, by position in the global batch
    positions: Tensor  # [N] among the completion tokens of its rollout, all of its rows
    turns: Tensor  # [N] assistant turn of its rollout
    envs: tuple[str, ...]  # [B] environment that the row was played in
    # The same N tokens after what a reference with hints sees, where there is one:
    hinted_token_ids: Tensor | None = None  # [B, H] int64
    hinted_mask: Tensor | None = None  # [B, H] bool
    # Filled in by rl/learner/preparation.py, where something needs them:
    old_logprobs: Tensor | None = None  # [N] log pi before the step's first update
    ref_logprobs: Tensor | None = None  # [N] of the reference
    value_targets: ValueTargets | None = None  # of the critic
    candidates: Tensor | None = None  # [N, K] the reference's likeliest tokens
    ref_candidate_logprobs: Tensor | None = None  # [N, K] of the reference

    @staticmethod
    def of(micro: MicroBatch, device: torch.device, step: int) -> "Batch":
        """Move a micro-batch to `device` and flatten its completion tokens, row by row.

        `step` is the one that it trains, which is the version of the policy in training.
        """
        # Flattened before it moves: a GPU would stop at every boolean index, to count.
        mask = torch.tensor(micro.completion_mask)
        rows = mask.nonzero()[:, 0]  # [N]
        positions = micro.first_positions[:, None] + micro.completion_mask.cumsum(1) - 1  # [B, T]
        flat = {
            "rollout_logprobs": torch.tensor(micro.rollout_logprobs)[mask],
            "advantages": torch.tensor(micro.advantages)[mask],
            "token_weights": torch.tensor(micro.token_weights)[mask],
            "staleness": step - torch.tensor(micro.token_versions, dtype=torch.int64)[mask],
            "sequence_ids": rows,
            "rollout_ids": torch.tensor(micro.rollout_ids, dtype=torch.int64)[rows],
            "positions": torch.tensor(positions, dtype=torch.int64)[mask],
            "turns": torch.tensor(micro.turns, dtype=torch.int64)[mask],
            "token_ids": torch.tensor(micro.token_ids, dtype=torch.int64),
            "mask": mask,
        }
        if micro.hinted_token_ids is not None:
            flat["hinted_token_ids"] = torch.tensor(micro.hinted_token_ids, dtype=torch.int64)
            flat["hinted_mask"] = torch.tensor(micro.hinted_mask)
        tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in flat.items()}
        return Batch(**tensors, envs=micro.envs)

    def weighted_sum(self, loss: Tensor) -> Tensor:
        """Return this micro-batch's share of the objective, given what each token adds [N]."""
        return (self.token_weights.to(loss.dtype) * loss).sum()


@dataclass(frozen=True)
class Objective:
    """Joins a token loss, its correction, the pull to a reference and the entropy bonus.

    `correction` applies where ratios are taken to old logprobs; with those of the sampler as the
    anchor, the ratio itself corrects.
    """

    token_loss: TokenLossFunction
    correction: CorrectionFunction | None = None
    kl: KLPenalty | None = None
    entropy_bonus: float = 0.0

    def __call__(
        self,
        batch: Batch,
        logprobs: Tensor,
        entropies: Tensor,
        beta: float = 0.0,
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the objective, and what `per_token` measured."""
        loss, metrics = self.per_token(batch, logprobs, entropies, beta, candidate_logprobs)
        return batch.weighted_sum(loss), metrics

    def per_token(
        self,
        batch: Batch,
        logprobs: Tensor,
        entropies: Tensor,
        beta: float,
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what each token adds, before its weight [N], and metrics without gradient.

        A metric has one number per token [N], or a single one for all of them.

        Args:
            batch: the micro-batch.
            logprobs: [N] of its completion tokens under the policy in training.
            entropies: [N] of the distributions they were drawn from.
            beta: the present weight of the divergence from the reference.
            candidate_logprobs: [N, K] of the reference's likeliest tokens under the policy, where
                the token loss reads them.

        Raises:
            ValueError: the token loss or a metric is not one number per token, or the loss has no
                gradient.

        """
        tokens = Tokens(
            logprobs=logprobs,
            rollout_logprobs=batch.rollout_logprobs.to(logprobs.dtype),
            advantages=batch.advantages.to(logprobs.dtype),
            sequence_ids=batch.sequence_ids,
            num_sequences=batch.token_ids.shape[0],
            staleness=batch.staleness,
            entropies=entropies.detach(),
            positions=batch.positions,
            turns=batch.turns,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            candidate_logprobs=candidate_logprobs,
            ref_candidate_logprobs=batch.ref_candidate_logprobs,
        )
        result = self.token_loss(tokens)
        _check(result.loss, logprobs)
        gap = log_ratio(tokens.rollout_logprobs, logprobs.detach())  # [N] log(pi / mu)
        metrics = {
            **_checked(result.metrics, logprobs),
            "entropy": entropies.detach(),
            "ratio_clamped": tokens.ratio_clamped,
            "kl_to_rollout": gap.expm1() - gap,  # k3 estimate of KL(mu || pi)
        }
        loss = result.loss
        if self.correction and tokens.old_logprobs is not None:
            corrected = self.correction(
                tokens.old_logprobs,
                tokens.rollout_logprobs,
                tokens.sequence_ids,
                tokens.num_sequences,
            )
            loss = corrected.weights * loss
            metrics |= {"correction": corrected.weights, **_checked(corrected.metrics, logprobs)}
        if self.kl and tokens.ref_logprobs is not None:
            divergence = self.kl.estimator(logprobs, tokens.ref_logprobs)  # [N]
            # Measured wherever there is a reference, even where nothing pulls towards it.
            metrics["kl_divergence"] = divergence.detach()
            if self.kl.place == "loss" and self.kl.acts:
                loss = loss + beta * divergence
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * entropies
        return loss, metrics


def _checked(metrics: Mapping[str, Tensor], logprobs: Tensor) -> dict[str, Tensor]:
    for name, values in metrics.items():
        if values.numel() != 1 and values.shape != logprobs.shape:
            raise ValueError(
                f"the metric {name!r} has the shape {list(values.shape)} for {len(logprobs)} "
                "tokens: return one number per token, or a single one for all of them"
            )
    return {name: values.detach() for name, values in metrics.items()}


def _check(loss: Tensor, logprobs: Tensor) -> None:
    if loss.shape != logprobs.shape:
        raise ValueError(
            f"the token loss returned a tensor of shape {list(loss.shape)} for {len(logprobs)} "
            "tokens: return one number per token, neither summed nor averaged (losses/tokens.py)"
        )
    if logprobs.requires_grad and not loss.requires_grad:
        raise ValueError(
            "the token loss has no gradient: compute it from tokens.logprobs or "
            "tokens.candidate_logprobs, which alone carry one (losses/tokens.py)"
        )
