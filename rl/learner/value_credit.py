"""From a critic's values to the advantage of every token, along whole rollouts.

    rewards of turns, less penalties of tokens -> rewards of steps
    value of a step: that of its first token, which was estimated from all that came before
    estimator (losses/gae.py) -> advantage of a step, and of all its tokens
    return of a step = advantage + value: what the value of its first token is trained towards

A step is a token or a turn. Whatever ended a rollout, it is worth 0 beyond its last token: where it
was cut off, no row holds the state that came next, and the limit belongs to the task.

R: rollouts of the global batch, L: completion tokens of the longest, K: turns of the one with most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]
"""(rewards [R, steps], values [R, steps]) -> advantages [R, steps]"""

_SPREAD_TOLERANCE = 1e-6  # below it a spread is rounding, and no lesson (losses/advantages.py)


@dataclass(frozen=True, eq=False)
class ValueTargets:
    """What the values of one micro-batch are trained by. N: its completion tokens."""

    returns: Tensor  # [N]
    old_values: Tensor  # [N] before the step's first update
    weights: Tensor  # [N] of each value in the loss; they sum to 1 over the global batch


@dataclass(frozen=True, eq=False)
class ValueCredit:
    """What each token is worth, and what the values should have been."""

    advantages: Tensor  # [R, L] 0 where no token counts
    returns: Tensor  # [R, L] of the token's step
    states: Tensor  # [R, L] True at the first token of each step: here values are trained


def credit(
    values: Tensor,
    turns: Tensor,
    exists: Tensor,
    rewards: Tensor,
    *,
    estimator: Estimator,
    over: Literal["tokens", "turns"],
    whiten: bool,
) -> ValueCredit:
    """Return advantages, returns and where values are trained.

    Args:
        values: [R, L] before each token.
        turns: [R, L] assistant turn of each token, rising.
        exists: [R, L] True where a token is that trains and whose rollout was scored.
        rewards: [R, L] what was earned by each token (`at_tokens`).
        estimator: of the advantages of steps.
        over: what a step is.
        whiten: whether advantages are standardised over all tokens.

    """
    starts = exists.clone()  # [R, L]
    if over == "turns":
        starts[:, 1:] &= turns[:, 1:] != turns[:, :-1]
    step = (starts.cumsum(1) - 1).clamp(min=0)  # [R, L] of each token; padding has zeros to add

    def by_step(table: Tensor, counts: Tensor) -> Tensor:
        return torch.zeros_like(table).scatter_add(1, step, table * counts)

    step_values = by_step(values, starts)
    advantages = estimator(by_step(rewards, exists), step_values)
    returns = (advantages + step_values).gather(1, step)
    advantages = advantages.gather(1, step) * exists
    return ValueCredit(_whitened(advantages, exists) if whiten else advantages, returns, starts)


def at_tokens(turn_rewards: Tensor, turns: Tensor, exists: Tensor) -> Tensor:
    """Return rewards [R, L]: that of each turn [R, K] at its last token.

    What a turn without tokens earned stands at the token before it, or at the first of all.
    """
    ordered = turns.masked_fill(~exists, torch.inf).contiguous()  # rising to the end of the line
    numbers = torch.arange(turn_rewards.shape[1], dtype=ordered.dtype)
    numbers = numbers.expand(turn_rewards.shape).contiguous()  # [R, K]
    last = (torch.searchsorted(ordered, numbers, right=True) - 1).clamp(min=0)  # [R, K]
    rewards = turn_rewards.new_zeros(exists.shape)
    return rewards.scatter_add(1, last, turn_rewards) if exists.numel() else rewards


def _whitened(advantages: Tensor, exists: Tensor) -> Tensor:
    """Less the mean of all tokens, in their standard deviations."""
    known = advantages[exists]  # [N]
    if not len(known):
        return advantages
    centred = (advantages - known.mean()) * exists
    spread = known.std(correction=0)
    return torch.zeros_like(centred) if spread <= _SPREAD_TOLERANCE else centred / spread
