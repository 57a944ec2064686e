"""What stays fixed while a batch trains: old and reference logprobs, rewards less the divergence.

    old   log pi before the step's first update, where one batch gets several updates
    ref   log of the reference, where a loss or a penalty reads it

R: rollouts of the global batch, N: completion tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.learner.kl import KLPenalty
from rl.learner.objective import Batch
from rl.learner.policy import Policy
from rl.learner.reference import Reference
from rl.records import Advantage, Floats, Ints, RankBatch


@dataclass(frozen=True)
class Preparation:
    """Fills in what the objective reads beside the policy in training. Collective.

    Attributes:
        reference: None where nothing reads it.
        keeps_old: a batch gets several updates.
        advantage: made anew where the penalty is part of the reward.

    """

    policy: Policy
    reference: Reference | None
    keeps_old: bool
    kl: KLPenalty
    advantage: Advantage

    def __call__(self, batch: RankBatch, beta: float) -> tuple[list[Batch], dict[str, float]]:
        """Return the micro-batches on the device with what is fixed, and metrics of the step."""
        batches = [Batch.of(micro, self.policy.ranks.device) for micro in batch.micro_batches]
        if self.reference:
            reference = self.reference
            batches = [replace(b, ref_logprobs=reference.logprobs(b)) for b in batches]
        penalised = self.reference is not None and self.kl.acts and self.kl.place == "reward"
        old = [self.policy.score(b) for b in batches] if self.keeps_old or penalised else []
        metrics: dict[str, float] = {}
        if penalised:
            batches, metrics = self._penalise(batch, batches, old, beta)
        if self.keeps_old:
            batches = [replace(b, old_logprobs=o) for b, o in zip(batches, old, strict=True)]
        return batches, metrics

    def _penalise(
        self, batch: RankBatch, batches: Sequence[Batch], old: Sequence[Tensor], beta: float
    ) -> tuple[list[Batch], dict[str, float]]:
        """Take beta times the divergence off every rollout's reward and compare groups again."""
        lost = torch.zeros(len(batch.rewards), dtype=torch.float64)  # [R]
        for b, logprobs in zip(batches, old, strict=True):
            assert b.ref_logprobs is not None
            divergence = self.kl.estimator(logprobs, b.ref_logprobs)  # [N]
            lost.index_add_(0, b.rollout_ids.cpu(), beta * divergence.double().cpu())
        lost = lost.to(self.policy.ranks.device)
        dist.all_reduce(lost)  # the rows of one group lie on several ranks
        advantages = penalised_advantages(
            batch.rewards, batch.group_ids, lost.cpu().numpy(), self.advantage
        )
        credited = [
            replace(b, advantages=advantages.to(b.advantages)[b.rollout_ids]) for b in batches
        ]
        return credited, {"train/kl_penalty": float(lost.mean())}


def penalised_advantages(
    rewards: Floats, group_ids: Ints, lost: np.ndarray, advantage: Advantage
) -> Tensor:
    """Return the advantages [R] of rewards [R] less what each lost [R], group by group."""
    remaining = [
        None if np.isnan(reward) else float(reward - penalty)
        for reward, penalty in zip(rewards.astype(np.float64), lost, strict=True)
    ]
    found: list[float] = []
    for _, members in groupby(zip(group_ids.tolist(), remaining, strict=True), lambda m: m[0]):
        found += advantage([reward for _, reward in members])
    return torch.tensor(found, dtype=torch.float32)
