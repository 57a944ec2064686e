"""The learning rate of every step, by hand, and which weights decay."""

import pytest
import torch
from torch import nn

from rl.learner.optim import AdamW, Muon

torch.set_num_threads(1)

KNOBS = {
    "learning_rate": 8.0, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0,
    "schedule": "constant", "warmup_steps": 0, "min_ratio": 0.25,
}  # fmt: skip
MUON_KNOBS = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adamw_ratio": 1.0}


def adamw(**changes):
    return AdamW(**{**KNOBS, **changes})


def muon(**changes):
    return Muon(**{**KNOBS, **MUON_KNOBS, **changes})


# cosine over 4 intervals: (1 + cos(k pi / 4)) / 2 = 1, 0.853553, 0.5, 0.146447, 0
TABLES = [
    ("constant", 4, [2, 4, 6, 8, 8, 8, 8]),
    ("linear", 2, [4, 8, 8, 6.5, 5, 3.5, 2]),
    ("cosine", 0, [8, 7.121320, 5, 2.878680, 2]),
    ("linear", 0, [8]),
    ("cosine", 3, [8 / 3, 16 / 3, 8]),
]


@pytest.mark.parametrize(("schedule", "warmup_steps", "rates"), TABLES)
def test_the_rate_of_every_step(schedule, warmup_steps, rates):
    optim = adamw(schedule=schedule, warmup_steps=warmup_steps)
    assert [optim.rate(k, len(rates)) for k in range(len(rates))] == pytest.approx(rates, rel=1e-6)
    assert adamw(schedule="cosine").rate(500, 100) == pytest.approx(2)  # beyond the last step


def test_weight_decay_leaves_vectors_alone_and_frozen_weights_out():
    module, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    given = [*module.parameters(), *frozen.parameters()]
    optimizer = adamw(weight_decay=0.5, learning_rate=0.125, beta1=0.5, eps=1e-3).optimizer(given)
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {id(module.weight): 0.5, id(module.bias): 0.0}
    assert isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.125, (0.5, 0.99), 1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_gets_the_hidden_matrices_and_adamw_everything_else_that_trains(tied):
    words, hidden, frozen = (nn.Parameter(torch.zeros(4, 6)) for _ in range(3))
    head = words if tied else nn.Parameter(torch.zeros(4, 6))
    norm, experts = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2, 4, 3))
    frozen.requires_grad_(False)
    others = [words, norm, experts] + [head] * (not tied)
    optimizer = muon().optimizer([frozen, hidden, *others], [words, head])
    parts = {id(p): g["part"] for g in optimizer.param_groups for p in g["params"]}
    assert parts == {id(hidden): "muon", **dict.fromkeys(map(id, others), "adamw")}


def test_a_first_update_by_muon_is_orthogonal_and_as_long_as_adamws():
    """All singular values of the gradient are the same, so one number tells what becomes of it."""
    module = nn.Linear(4, 4, bias=False)
    before = module.weight.detach().clone()
    knobs = {"learning_rate": 0.5, "ns_steps": 1}
    optimizer = muon(**knobs).optimizer([module.weight])  # and no weight for AdamW
    module.weight.grad = 3 * torch.eye(4)
    optimizer.step()
    # Scaled to length 1 the identity has singular values of 1/2, which one iteration makes
    # 3.4445 / 2 - 4.7750 / 8 + 2.0315 / 32 = 1.188859. The factor of the shape is 0.2 * sqrt(4).
    length = 0.5 * 0.4 * 1.188859
    moved = before - module.weight.detach()
    torch.testing.assert_close(moved, length * torch.eye(4), rtol=0.01, atol=1e-6)
