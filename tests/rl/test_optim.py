"""The learning rate of every step, by hand, and which weights decay."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from rl.optim import AdamW

torch.set_num_threads(1)


def adamw(**changes):
    knobs = {
        "learning_rate": 8.0,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "schedule": "constant",
        "warmup_steps": 0,
        "min_ratio": 0.25,
    }
    return AdamW(**{**knobs, **changes})


# cosine over 4 intervals: (1 + cos(k pi / 4)) / 2 = 1, 0.853553, 0.5, 0.146447, 0
TABLES = [
    ("constant", 0, [8, 8, 8, 8, 8]),
    ("constant", 4, [2, 4, 6, 8, 8, 8, 8]),
    ("linear", 0, [8, 6.5, 5, 3.5, 2]),
    ("linear", 2, [4, 8, 8, 6.5, 5, 3.5, 2]),
    ("cosine", 0, [8, 7.121320, 5, 2.878680, 2]),
    ("cosine", 2, [4, 8, 8, 7.121320, 5, 2.878680, 2]),
    ("linear", 0, [8]),
    ("cosine", 3, [8 / 3, 16 / 3, 8]),
]


@pytest.mark.parametrize(("schedule", "warmup_steps", "rates"), TABLES)
def test_the_rate_of_every_step(schedule, warmup_steps, rates):
    optim = adamw(schedule=schedule, warmup_steps=warmup_steps)
    assert [optim.rate(k, len(rates)) for k in range(len(rates))] == pytest.approx(rates, rel=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 50])
def test_the_first_step_moves_and_the_last_is_at_the_minimum(schedule, warmup_steps):
    optim = adamw(schedule=schedule, warmup_steps=warmup_steps)
    rates = [optim.rate(step, 100) for step in range(100)]
    assert rates[0] > 0
    assert max(rates) == rates[warmup_steps] == 8
    assert rates[-1] == pytest.approx(2)
    rises = [later - earlier for earlier, later in pairwise(rates)]
    assert all(rise >= 0 for rise in rises[:warmup_steps])
    assert all(rise <= 0 for rise in rises[warmup_steps:])


def test_a_step_beyond_the_last_stays_at_the_minimum():
    assert adamw(schedule="cosine").rate(500, 100) == pytest.approx(2)


def test_min_ratio_one_is_constant():
    optim = adamw(schedule="cosine", min_ratio=1.0)
    assert {optim.rate(step, 10) for step in range(10)} == {8.0}


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 2))
        self.norm = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_weight_decay_leaves_vectors_alone_and_frozen_weights_out():
    module = Module()
    optimizer = adamw(weight_decay=0.5, learning_rate=0.125).optimizer(module.parameters())
    for parameter in (module.matrix, module.norm):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert module.matrix.tolist() == [[0.9375] * 2] * 2  # 1 - 0.125 * 0.5
    assert module.norm.tolist() == [1.0, 1.0]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(module.matrix), id(module.norm)]


def test_the_knobs_reach_the_optimizer():
    optimizer = adamw(beta1=0.5, beta2=0.75, eps=1e-3).optimizer(Module().parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (8.0, (0.5, 0.75), 1e-3)


def test_a_model_of_matrices_only_has_one_group():
    optimizer = adamw().optimizer([nn.Parameter(torch.ones(2, 2))])
    assert len(optimizer.param_groups) == 1
