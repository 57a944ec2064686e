"""Self-certainty (Intuitor, arXiv:2505.19590): the reward is how sure the policy was of its answer.

    u_i = mean of KL(uniform || pi) over the tokens of rollout i
    A_i = (u_i - mean of u in the group) / (std + epsilon)      std with Bessel's correction

`policy_loss` computes the loss from these advantages. The rewards of the environment are only
metrics. A rollout that is alone in its group has the advantage 0.

pi is the policy in training, at the sampler's temperature, over the whole vocabulary. So u is exact
if this policy sampled the rollouts: without staleness, and in the first update of a batch. Else u
is the certainty of the newer policy about the same tokens, and each update computes u again.

N: tokens, R: rollouts of the micro-batch, G: its groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from losses.tokens import TokenLoss, Tokens, mean_per_sequence, sum_per_sequence


@dataclass(frozen=True, kw_only=True)
class SelfCertainty:
    """The loss. conf/loss/self_certainty.yaml explains the options."""

    whole_groups: ClassVar[bool] = True  # all rollouts of a group are in one micro-batch

    policy_loss: Callable[[Tokens], TokenLoss]
    epsilon: Annotated[float, Meta(gt=0)]

    def __call__(self, tokens: Tokens) -> TokenLoss:
        """Return the policy loss [N]; self_certainty [N] is u_i of the token's rollout."""
        assert tokens.kl_from_uniform is not None
        ids, rollouts = tokens.rollout_ids.unique(return_inverse=True)  # [R], [N] index in R
        certainties = mean_per_sequence(tokens.kl_from_uniform, rollouts, len(ids))  # [R]
        groups = torch.zeros_like(ids).scatter(0, rollouts, tokens.group_ids)  # [R]
        advantages = zscores(certainties, groups, self.epsilon)[rollouts]
        result = self.policy_loss(replace(tokens, advantages=advantages.to(tokens.logprobs.dtype)))
        return replace(result, metrics={**result.metrics, "self_certainty": certainties[rollouts]})


def zscores(values: Tensor, groups: Tensor, epsilon: float) -> Tensor:
    """Return (value - mean) / (std + epsilon) [R], with mean and std of each group."""
    ids, index, counts = groups.unique(return_inverse=True, return_counts=True)  # [G], [R], [G]
    centred = values - mean_per_sequence(values, index, len(ids))[index]  # [R]
    variances = sum_per_sequence(centred.square(), index, len(ids)) / (counts - 1).clamp(min=1)
    return centred / (variances.sqrt()[index] + epsilon)
