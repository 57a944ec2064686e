"""Compute the advantage of each token from the critic's values of all tokens of its rollout.

    reward of a step       sum of its tokens' rewards, minus KL penalties if kl.place=reward
    value of a step        the critic's value of its first token, predicted from all earlier tokens
    advantage of a step    from the estimator (losses/gae.py), the same for all tokens of the step
    return of a step       advantage + value, the training target for the value of its first token

A step is a token or a turn. The value after the last token is 0, also in a truncated rollout,
because the state after truncation was not sampled, and the length limit is a rule of the task.

R: rollouts of the global batch, L: maximum completion tokens, K: maximum turns of a rollout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]
"""(rewards [R, steps], values [R, steps]) -> advantages [R, steps]"""

_MIN_STD = 1e-6  # a smaller standard deviation counts as rounding error


@dataclass(frozen=True, eq=False)
class ValueTargets:
    """The critic's training targets for the N completion tokens of one micro-batch."""

    returns: Tensor  # [N]
    old_values: Tensor  # [N] values before the first update on the batch
    weights: Tensor  # [N] loss weight of each value. The weights of the global batch sum to 1


@dataclass(frozen=True, eq=False)
class ValueCredit:
    advantages: Tensor  # [R, L] advantage of each token, 0 for untrained tokens
    returns: Tensor  # [R, L] return of each token's step
    states: Tensor  # [R, L] True at the first token of each step, whose value is trained


def credit(
    values: Tensor,  # [R, L] value predicted before each token
    turns: Tensor,  # [R, L] index of each token's assistant turn, ascending
    trained: Tensor,  # [R, L] True for trained tokens of rollouts that have a reward
    rewards: Tensor,  # [R, L] reward of each token (`rewards_at_tokens`)
    *,
    estimator: Estimator,
    over: Literal["tokens", "turns"],  # whether a step is a token or a turn
    whiten: bool,  # whether to standardise the advantages over all trained tokens
) -> ValueCredit:
    starts = trained.clone()  # [R, L]
    if over == "turns":
        starts[:, 1:] &= turns[:, 1:] != turns[:, :-1]
    step = (starts.cumsum(1) - 1).clamp(min=0)  # [R, L] index of each token's step

    def sum_by_step(table: Tensor, mask: Tensor) -> Tensor:
        return torch.zeros_like(table).scatter_add(1, step, table * mask)

    step_values = sum_by_step(values, starts)
    advantages = estimator(sum_by_step(rewards, trained), step_values)
    returns = (advantages + step_values).gather(1, step)
    advantages = advantages.gather(1, step) * trained
    return ValueCredit(_whiten(advantages, trained) if whiten else advantages, returns, starts)


def rewards_at_tokens(turn_rewards: Tensor, turns: Tensor, exists: Tensor) -> Tensor:
    """Return rewards [R, L] with the reward of each turn [R, K] at the turn's last token.

    The reward of a turn without tokens is at the preceding token, or else at the first token.
    """
    # Set padding to infinity, because searchsorted requires ascending rows.
    ordered = turns.masked_fill(~exists, torch.inf).contiguous()
    numbers = torch.arange(turn_rewards.shape[1], dtype=ordered.dtype)
    numbers = numbers.expand(turn_rewards.shape).contiguous()  # [R, K]
    last = (torch.searchsorted(ordered, numbers, right=True) - 1).clamp(min=0)  # [R, K]
    rewards = turn_rewards.new_zeros(exists.shape)
    return rewards.scatter_add(1, last, turn_rewards) if exists.numel() else rewards


def _whiten(advantages: Tensor, trained: Tensor) -> Tensor:
    chosen = advantages[trained]  # [number of trained tokens]
    if not len(chosen):
        return advantages
    centred = (advantages - chosen.mean()) * trained
    std = chosen.std(correction=0)
    return torch.zeros_like(centred) if std <= _MIN_STD else centred / std
