"""Statistics of the whole batch for a loss that reads some, such as a threshold over its tokens.

    statistics(tokens) -> [K]             sums over the tokens of a micro-batch
    loss(tokens, statistics) -> TokenLoss     given their sums over all micro-batches and ranks

Sums do not depend on the split of the batch, so neither does a threshold that follows from sums.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rl.learner.objective import Batch, Objective


def reads_statistics(objective: Objective) -> bool:
    """Return whether the loss of the objective still needs the statistics of its batch."""
    return hasattr(objective.token_loss, "statistics")


@torch.no_grad()
def with_statistics(objective: Objective, batches: Sequence[Batch]) -> Objective:
    """Return the objective with the statistics of scored micro-batches of all ranks. Collective."""
    loss: Any = objective.token_loss
    seen = [b.with_outputs(b.logprobs, b.entropies, b.candidate_logprobs) for b in batches]
    total = torch.stack([loss.statistics(tokens).double() for tokens in seen]).sum(0)  # [K]
    dist.all_reduce(total)
    return replace(objective, token_loss=partial(loss, statistics=total))
