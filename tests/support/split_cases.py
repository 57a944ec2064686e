"""More cases of policy_worker.py: many bfloat16 micro-batches in one step."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

SPLIT_MODES = {1: ("zero0", "zero1", "zero2", "zero3"), 2: ("zero0", "zero2")}
ALONE_MODES = {1: ("zero0", "zero2"), 2: ("zero1", "zero3")}
NUM_ROWS = 64


class KeptGradient(torch.optim.SGD):
    """Keeps what reaches the optimizer, whatever share of it this rank holds."""

    def step(self, closure: Any = None) -> None:
        held = [p.grad for group in self.param_groups for p in group["params"]]
        self.gradient = torch.cat([g.detach().double().flatten() for g in held if g is not None])


class StandingStill:
    """Stands in for rl.learner.optim.AdamW."""

    def optimizer(self, parameters: Any, embeddings: Any) -> torch.optim.Optimizer:
        self.made = KeptGradient([p for p in parameters if p.requires_grad], lr=0.0)
        return self.made

    def rate(self, step: int, max_steps: int) -> float:
        return 0.0


def many_rows(cases: Any, count: int = NUM_ROWS) -> list[Any]:
    """Rows of many groups, each with an advantage and a completion."""
    from losses.aggregation import token_mean
    from rl.rollouts.plan import weigh
    from tests.support import tiny_policy as tiny

    groups = tiny.groups(cases.twin, num_groups=count // 2, seed=3)
    rows = [row for row in weigh(groups, token_mean) if row.row.num_completion and row.teaches]
    return rows[:count]


def splits(cases: Any, mode: str) -> dict[str, Any]:
    """The gradient of a batch row by row, beside the sum of what each row gives by itself.

    Every pass rounds to bfloat16 on its own, so only the very same passes can be compared exactly.
    """
    optim = StandingStill()
    policy = cases.policy("bfloat16", mode, optim)
    batch = cases.split(many_rows(cases), 1)
    policy.update(batch, cases.objective)
    together, total = optim.made.gradient, torch.zeros_like(optim.made.gradient)
    for micro in batch.micro_batches:
        policy.update(replace(batch, micro_batches=(micro,)), cases.objective)
        total += optim.made.gradient
    return {
        "micro_batches": len(batch.micro_batches) * cases.ranks.world,
        "error": difference(together, total),
    }


def alone(cases: Any, dtype: str, mode: str) -> dict[str, Any]:
    """The gradient of 256 rows in one micro-batch a rank, beside that of one row a micro-batch."""
    optim, rows = StandingStill(), many_rows(cases, 256)
    policy = cases.policy(dtype, mode, optim)
    gradients, counts = [], []
    for budget in (10**6, 1):
        batch = cases.split(rows, budget)
        policy.update(batch, cases.objective)
        gradients.append(optim.made.gradient)
        counts.append(len(batch.micro_batches) * cases.ranks.world)
    return {"micro_batches": counts, "error": difference(*gradients)}


def difference(one: Any, other: Any) -> float:
    """Relative to the second; a rank may hold but a share of both."""
    squares = torch.stack([(one - other).square().sum(), other.square().sum()])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())
