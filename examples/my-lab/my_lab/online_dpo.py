"""Online DPO: prefer the best rollout of each group to its worst rollout. arXiv:2402.04792.

    margin_i = sum over the tokens of rollout i of (log pi - log ref)
    pair     = -log sigmoid(beta * (margin_best - margin_worst))        best and worst by advantage
    loss_t   = pair / 2 for every token of the two rollouts, 0 for all other tokens

Each of the two rollouts gets half of the pair's loss. With aggregation=sequence_mean, the objective
is therefore the sum of `pair` over the groups, divided by the number of rollouts. A group of equal
advantages has no pair. Of several best or worst rollouts, the first counts.

N: tokens, R: rollouts of the micro-batch.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.nn.functional import logsigmoid

from losses.tokens import TokenLoss, Tokens, mean_per_sequence, sum_per_sequence

PER_SEQUENCE = True  # the run requires an aggregation that weighs all rollouts equally


@dataclass(frozen=True, kw_only=True)
class OnlineDPO:
    """The loss. conf/loss/online_dpo.yaml explains the option."""

    whole_groups: ClassVar[bool] = True  # all rollouts of a group are in one micro-batch
    stays_near_reference: ClassVar[bool] = True  # the reference may be the initial policy

    beta: Annotated[float, Meta(gt=0)]

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return `loss_t` [N]. The metric paired [N] is 1 for the tokens of a pair."""
        assert tokens.ref_logprobs is not None
        ids, rollouts = tokens.rollout_ids.unique(return_inverse=True)  # [R], [N] index in R
        margins = sum_per_sequence(tokens.logprobs - tokens.ref_logprobs, rollouts, len(ids))
        advantages = mean_per_sequence(tokens.advantages, rollouts, len(ids))  # [R]
        groups = torch.zeros_like(ids).scatter(0, rollouts, tokens.group_ids)  # [R]
        losses, paired = 0 * margins, torch.zeros_like(advantages)  # [R] each
        for best, worst in pairs(advantages, groups):
            two = torch.tensor([best, worst], device=ids.device)
            pair = -logsigmoid(self.beta * (margins[best] - margins[worst]))
            losses = losses.index_add(0, two, pair.expand(2) / 2)
            paired[two] = 1.0
        return TokenLoss(losses[rollouts], {"paired": paired[rollouts]})


def pairs(advantages: Tensor, groups: Tensor) -> list[tuple[int, int]]:
    """Return the best and the worst rollout of each group in which advantages [R] differ."""
    found = []
    for group in groups.unique():
        members = (groups == group).nonzero()[:, 0]
        best, worst = (members[way(advantages[members])] for way in (torch.argmax, torch.argmin))
        if advantages[best] > advantages[worst]:
            found.append((int(best), int(worst)))
    return found
