"""Compute once per batch the quantities that stay fixed during its updates.

    old           log pi before the step's first update, if one batch gets several updates
    ref           logprobs of the reference, if a loss or a penalty reads them
    advantages    with a critic, computed from its values; else those of the batch, minus the KL
                  penalty if kl.place=reward

R: rollouts of the global batch, N: completion tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.schedules import NO_SCHEDULES, Schedules
from rl.learner.critic import Critic
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import Rows
from rl.learner.objective import Batch
from rl.learner.policy import Policy
from rl.learner.reference.protocol import Reference
from rl.records import Ints, RankBatch


@dataclass(frozen=True)
class Preparation:
    """Callable that adds old logprobs, reference logprobs and advantages to a batch. Collective."""

    policy: Policy
    reference: Reference | None  # None if no loss or penalty reads a reference
    keeps_old: bool  # whether a batch gets several updates, which need the old logprobs
    kl: KLPenalty
    compared: bool  # whether advantages compare rollouts; if so, penalties are centred by group
    critic: Critic | None = None
    schedules: Schedules = NO_SCHEDULES

    def __call__(self, batch: RankBatch, beta: float) -> tuple[list[Batch], dict[str, float]]:
        batches = [
            Batch.of(micro, self.policy.ranks.device, batch.step) for micro in batch.micro_batches
        ]
        if temperature := self.schedules.functions.get("sampler.temperature"):
            of_rollout = torch.tensor([[temperature(v)] for v in batch.versions.tolist()])  # [R, 1]
            of_rollout = of_rollout.to(self.policy.ranks.device)
            batches = [replace(b, temperatures=of_rollout[b.rollout_ids]) for b in batches]
        if self.reference:
            scores = self.reference.score([_reference_rows(batch) for batch in batches])
            batches = [
                replace(
                    batch,
                    ref_logprobs=score.logprobs,
                    candidates=score.candidates,
                    ref_candidate_logprobs=score.candidate_logprobs,
                )
                for batch, score in zip(batches, scores, strict=True)
            ]
        penalised = self.reference is not None and self.kl.beta > 0 and self.kl.place == "reward"
        needs_old = self.keeps_old or penalised
        old = [self.policy.score(b) for b in batches if needs_old]
        metrics = self.reference.metrics() if self.reference else {}
        pairs = zip(batches, old, strict=True) if penalised else ()
        penalties = [self._kl_penalty(*each, beta) for each in pairs]
        if self.critic:
            batches, credit = self.critic.credit(batch, batches, penalties)
            metrics |= credit
        elif penalties:
            batches, penalty = self._subtract_penalties(batch, batches, penalties)
            metrics |= penalty
        if self.keeps_old:
            batches = [replace(b, old_logprobs=o) for b, o in zip(batches, old, strict=True)]
        return batches, metrics

    def _kl_penalty(self, batch: Batch, old_logprobs: Tensor, beta: float) -> Tensor:
        assert batch.ref_logprobs is not None
        return beta * self.kl.estimator(old_logprobs, batch.ref_logprobs).double()

    def _subtract_penalties(
        self, batch: RankBatch, batches: Sequence[Batch], penalties: Sequence[Tensor]
    ) -> tuple[list[Batch], dict[str, float]]:
        # Sum over the ranks, because the rows of one rollout may be on several ranks.
        lost, tokens = torch.zeros(2, len(batch.rewards), dtype=torch.float64)  # [R] each
        for b, penalty in zip(batches, penalties, strict=True):
            lost.index_add_(0, b.rollout_ids.cpu(), penalty.cpu())
            tokens.index_add_(0, b.rollout_ids.cpu(), torch.ones_like(penalty).cpu())
        sums = torch.stack([lost, tokens]).to(self.policy.ranks.device)
        dist.all_reduce(sums)
        lost, tokens = sums.cpu().numpy()
        counted = (tokens > 0) & ~np.isnan(batch.rewards)  # [R]
        relative = torch.tensor(
            relative_penalties(lost, counted, batch.group_ids if self.compared else None)
        )
        credited = [
            replace(b, advantages=b.advantages - relative.to(b.advantages)[b.rollout_ids])
            for b in batches
        ]
        return credited, {"train/kl_penalty": float(lost[counted].sum() / max(counted.sum(), 1))}


def _reference_rows(batch: Batch) -> Rows:
    if batch.hinted_token_ids is None or batch.hinted_mask is None:
        return Rows(batch.token_ids, batch.mask, batch.envs, batch.temperatures, batch.kept)
    rows = batch.hinted_token_ids, batch.hinted_mask
    return Rows(*rows, batch.envs, batch.temperatures, batch.kept)


def relative_penalties(
    sums: np.ndarray,  # [R] beta times the divergence, summed over a rollout's tokens
    counted: np.ndarray,  # [R] True for trained rollouts that have a reward
    group_ids: Ints | None,  # [R] or None if the advantage compares no rollouts
) -> np.ndarray:
    """Return each rollout's penalty [R], minus the mean of its group if `group_ids` is given.

    The caller subtracts the result from the advantages, not from the rewards. Otherwise a z-score
    would amplify small differences of the penalties in a group with equal rewards (docs/losses.md).
    """
    sums = np.where(counted, sums, 0.0)
    if group_ids is None:
        return sums
    numbers = np.unique(group_ids, return_inverse=True)[1]  # [R] number of each rollout's group
    means = np.bincount(numbers, sums) / np.maximum(np.bincount(numbers, counted), 1)
    return np.where(counted, sums - means[numbers], 0.0)
