"""What stays fixed while a batch trains: old and reference logprobs, advantages less divergence.

    old   log pi before the step's first update, where one batch gets several updates
    ref   log of the reference, where a loss or a penalty reads it

R: rollouts of the global batch, N: completion tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.learner.kl import KLPenalty
from rl.learner.objective import Batch
from rl.learner.policy import Policy
from rl.learner.reference import Reference
from rl.records import Ints, RankBatch


@dataclass(frozen=True)
class Preparation:
    """Fills in what the objective reads beside the policy in training. Collective.

    Attributes:
        reference: None where nothing reads it.
        keeps_old: a batch gets several updates.
        compared: whether advantages have a baseline; of a penalty that is part of the reward.

    """

    policy: Policy
    reference: Reference | None
    keeps_old: bool
    kl: KLPenalty
    compared: bool

    def __call__(self, batch: RankBatch, beta: float) -> tuple[list[Batch], dict[str, float]]:
        """Return the micro-batches on the device with what is fixed, and metrics of the step."""
        batches = [
            Batch.of(micro, self.policy.ranks.device, batch.step) for micro in batch.micro_batches
        ]
        if self.reference:
            references = self.reference.logprobs(batches)
            batches = [replace(b, ref_logprobs=r) for b, r in zip(batches, references, strict=True)]
        penalised = self.reference is not None and self.kl.acts and self.kl.place == "reward"
        old = [self.policy.score(b) for b in batches] if self.keeps_old or penalised else []
        metrics = self.reference.metrics() if self.reference else {}
        if penalised:
            batches, penalty = self._penalise(batch, batches, old, beta)
            metrics |= penalty
        if self.keeps_old:
            batches = [replace(b, old_logprobs=o) for b, o in zip(batches, old, strict=True)]
        return batches, metrics

    def _penalise(
        self, batch: RankBatch, batches: Sequence[Batch], old: Sequence[Tensor], beta: float
    ) -> tuple[list[Batch], dict[str, float]]:
        """Take beta times the divergence off every rollout's advantage."""
        # By rollout, not by row: one that forked lies in several rows, perhaps on several ranks.
        lost, tokens = torch.zeros(2, len(batch.rewards), dtype=torch.float64)  # [R] each
        for b, logprobs in zip(batches, old, strict=True):
            assert b.ref_logprobs is not None
            divergence = self.kl.estimator(logprobs, b.ref_logprobs)  # [N]
            lost.index_add_(0, b.rollout_ids.cpu(), beta * divergence.double().cpu())
            tokens.index_add_(0, b.rollout_ids.cpu(), torch.ones_like(divergence).double().cpu())
        sums = torch.stack([lost, tokens]).to(self.policy.ranks.device)
        dist.all_reduce(sums)  # the rows of one group lie on several ranks
        lost, tokens = sums.cpu().numpy()
        counts = (tokens > 0) & ~np.isnan(batch.rewards)  # [R]
        penalties = torch.tensor(
            relative_penalties(lost, counts, batch.group_ids if self.compared else None)
        )
        credited = [
            replace(b, advantages=b.advantages - penalties.to(b.advantages)[b.rollout_ids])
            for b in batches
        ]
        return credited, {"train/kl_penalty": float(lost.mean())}


def relative_penalties(lost: np.ndarray, counts: np.ndarray, group_ids: Ints | None) -> np.ndarray:
    """Return what each rollout's advantage loses [R]: its penalty less the mean of its group's.

    Advantages are made of the rewards alone and the penalty is taken off afterwards, in its own
    units. Were the difference normalised, a group in which all rewards are equal would have no
    spread but the penalties', and their noise would be blown up into a lesson (docs/losses.md).

    Args:
        lost: [R] beta times the divergence summed over a rollout's tokens.
        counts: [R] rollouts that were scored and train; the others lose nothing and stay out of
            the mean, for theirs was never measured or pulls at nothing.
        group_ids: [R]; None where the advantage has no baseline.

    """
    if group_ids is None:
        return np.where(counts, lost, 0.0)
    penalties = np.zeros_like(lost)
    for group_id in np.unique(group_ids):
        members = counts & (group_ids == group_id)
        if members.any():
            penalties[members] = lost[members] - lost[members].mean()
    return penalties
