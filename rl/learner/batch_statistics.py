"""Statistics of the whole batch for a loss that reads some, such as a threshold over its tokens.

    statistics(tokens) -> [K]             sums over the tokens of a micro-batch
    loss(tokens, statistics) -> TokenLoss     given their sums over all micro-batches and ranks

Sums do not depend on the split of the batch, so neither does a threshold that follows from sums.
The statistics of all tokens come before the loss of the first. The logprobs for them come from

1. the forward pass of the update, if each rank has one micro-batch,
2. else, in the first update, the pass that computed old logprobs, if there is one,
3. else another forward pass over all micro-batches, without dropout.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from losses.tokens import Tokens
from rl.learner.objective import Batch, Objective


def reads_statistics(objective: Objective) -> bool:
    """Return whether the loss of the objective still needs the statistics of its batch."""
    return hasattr(objective.token_loss, "statistics")


@torch.no_grad()
def with_statistics(objective: Objective, tokens: Sequence[Tokens]) -> Objective:
    """Return the objective with the statistics of the tokens of all ranks. Collective."""
    loss: Any = objective.token_loss
    total = torch.stack([loss.statistics(each).double() for each in tokens]).sum(0)  # [K]
    dist.all_reduce(total)
    return replace(objective, token_loss=partial(loss, statistics=total))


def scored_first(
    objective: Objective, batches: Sequence[Batch], score: Callable[[Batch], Batch]
) -> Objective:
    """Return the objective with the statistics of several micro-batches, if its loss reads any.

    `score` sets the logprobs and entropies of a micro-batch by a forward pass.
    """
    if not reads_statistics(objective) or len(batches) == 1:
        return objective
    scored = [batch if batch.scored else score(batch) for batch in batches]
    seen = [b.with_outputs(b.logprobs, b.entropies, b.candidate_logprobs) for b in scored]
    return with_statistics(objective, seen)
