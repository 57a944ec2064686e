"""Statistics of the whole batch for a loss that reads some, such as a threshold over its tokens.

    statistics(tokens) -> [K]             sums over the tokens of a micro-batch
    loss(tokens, statistics) -> TokenLoss     given their sums over all micro-batches and ranks

A sum does not depend on the split of the batch, so neither does a threshold that follows from sums.
The statistics need logprobs before the loss of the first micro-batch. Three passes can provide them:

1. Each rank has one micro-batch: the forward pass of the update.
2. The first of several updates: the pass that computed the old logprobs.
3. Otherwise another forward pass over all micro-batches, without dropout.
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
