"""KL estimators, GAE and the critic's loss against numbers worked by hand."""

import math

import pytest
import torch

from losses.gae import gae
from losses.kl import k1, k2, k3
from losses.squared_error import squared_error

LN2 = math.log(2)
E20, E_20 = 485165195.4097903, 2.061153622438558e-9  # e^20, e^-20


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def exact(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # k1 = log pi - log ref, gradient 1
        (k1, (LN2, -LN2, 0, 30, -30), (1, 1, 1, 1, 1)),
        # k2 = k1^2 / 2, gradient k1
        (k2, (LN2 * LN2 / 2, LN2 * LN2 / 2, 0, 450, 450), (LN2, -LN2, 0, 30, -30)),
        # k3 = exp(-k1) + k1 - 1: 1/2 + ln 2 - 1 and 2 - ln 2 - 1; gradient 1 - exp(-k1)
        (k3, (LN2 - 0.5, 1 - LN2, 0, E_20 + 19, E20 - 21), (0.5, -1, 0, 0, 0)),
    ],
    ids=["k1", "k2", "k3"],
)
def test_kl_value_and_gradient(estimator, values, gradients):
    # log pi - log ref = ln 2 (ratio 2), -ln 2, 0, and 30 and -30, beyond the clamp of k3
    logprobs = vector(-LN2, -2 * LN2, -LN2, -1, -31).requires_grad_()
    ref_logprobs = vector(-2 * LN2, -LN2, -LN2, -31, -1).requires_grad_()
    out = estimator(logprobs, ref_logprobs)
    out.sum().backward()
    exact([out, logprobs.grad], [vector(*values), vector(*gradients)])
    assert ref_logprobs.grad is None


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "expected"),
    [
        # the value after the last step is 0
        (0.5, 1.0, [-0.25, 0.25, 0.5]),  # returns 1/4, 1/2, 1, minus the value
        # deltas 0.5 * 0.25 - 0.5, 0.5 * 0.5 - 0.25, 1 - 0.5
        (0.5, 0.0, [-0.375, 0.0, 0.5]),
        # from the back: 0.5; 0 + 0.25 * 0.5; -0.375 + 0.25 * 0.125
        (0.5, 0.5, [-0.34375, 0.125, 0.5]),
    ],
)
def test_a_rollout_beside_a_longer_one_has_the_advantages_of_the_table(gamma, gae_lambda, expected):
    rewards = vector([0, 0, 1, 0, 0], [1, 2, 3, 4, 5])
    values = vector([0.5, 0.25, 0.5, 0, 0], [5, 4, 3, 2, 1])
    found = gae(rewards, values, gamma=gamma, gae_lambda=gae_lambda)
    exact(found[0], vector(*expected, 0, 0))
    for shape in ((0, 3), (3, 0)):
        assert gae(torch.zeros(shape), torch.zeros(shape), gamma=1.0, gae_lambda=1.0).shape == shape


PLAIN = [  # value, return, old value; loss = (V - R)^2 / 2, gradient V - R
    (1.0, 3.0, 0.0, 2.0, -2.0, 0),
    (3.0, 1.0, -9.0, 2.0, 2.0, 0),
]
CLIPPED = [  # the value may move 0.5 from the old one
    (0.25, 1.0, 0.0, 0.28125, -0.75, 0),  # within: 0.75^2 / 2
    (1.0, 2.0, 0.0, 1.125, 0.0, 1),  # beyond, towards the return: (0.5 - 2)^2 / 2 is the larger
    (-1.0, -2.0, 0.0, 1.125, 0.0, 1),  # likewise below
    (-1.0, 1.0, 0.0, 2.0, -2.0, 1),  # beyond, away from the return: (-1 - 1)^2 / 2 is the larger
    (1.0, 0.5, 0.0, 0.125, 0.5, 1),  # beyond the return as well: the bounded one is on it
    (0.5, 1.0, 0.0, 0.125, -0.5, 0),  # moved by exactly 0.5
]


@pytest.mark.parametrize(("rows", "clip"), [(PLAIN, None), (CLIPPED, 0.5)], ids=["null", "0.5"])
def test_the_loss_and_gradient_of_values_match_the_table(rows, clip):
    values, returns, old_values, losses, gradients, beyond = vector(*rows).T
    values.requires_grad_()
    result = squared_error(values, returns, old_values, clip=clip)
    (gradient,) = torch.autograd.grad(result.loss.sum(), values)
    exact([result.loss, gradient], [losses, gradients])
    found = {name: metric.tolist() for name, metric in result.metrics.items()}
    assert found == ({} if clip is None else {"value_clip_fraction": beyond.tolist()})
    assert not any(metric.requires_grad for metric in result.metrics.values())
