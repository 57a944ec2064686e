"""Statistics of the global batch for a loss that reads them, for example to compute a threshold.

    loss.statistics(tokens) -> [K]                  K sums over the tokens of a micro-batch
    loss(tokens, statistics=total) -> TokenLoss     total: [K], summed over micro-batches and ranks

Sums, and a threshold computed from sums, are the same for every split into micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from losses.tokens import Tokens
from rl.learner.objective import Objective, with_outputs


def reads_statistics(objective: Objective) -> bool:
    """Return whether the loss reads statistics that `with_statistics` has not yet passed to it."""
    return hasattr(objective.token_loss, "statistics")


@torch.no_grad()
def with_statistics(objective: Objective, batches: Sequence[Tokens]) -> Objective:
    """Return the objective with the global batch's statistics bound to its loss. Collective."""
    loss: Any = objective.token_loss
    seen = [with_outputs(b, b.logprobs, b.entropies, b.candidate_logprobs) for b in batches]
    total = torch.stack([loss.statistics(tokens).double() for tokens in seen]).sum(0)  # [K]
    dist.all_reduce(total)
    return replace(objective, token_loss=partial(loss, statistics=total))
