"""KL estimators, GAE, the critic's loss and corrections against numbers worked by hand."""

import math
from functools import partial

import pytest
import torch

from losses import correction
from losses.gae import gae
from losses.kl import k1, k2, k3
from losses.squared_error import squared_error
from losses.tokens import Tokens

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


# Sequence 0: ratios 4 and 1/2, product 2, geometric mean sqrt 2 = 1.414
# Sequence 1: ratios 1/4 and 1/4, product 1/16, geometric mean 1/4
# Sequence 2: ratio 8. Sequence 3 has no token.
OLD = (1 / 2, 1 / 8, 1 / 4, 1 / 8, 1 / 2)
MU = (1 / 8, 1 / 2, 1 / 2, 1 / 2, 1 / 16)
IDS = (0, 1, 0, 1, 2)

TRUNCATED, MASKED = "correction_truncated", "correction_masked"
TABLE = [
    (correction.none, {}, (1, 1, 1, 1, 1), {}),
    (correction.tis_token, {"cap": 2}, (2, 1 / 4, 1 / 2, 1 / 4, 2), {TRUNCATED: [1, 0, 0, 0, 1]}),
    (correction.tis_sequence, {"cap": 3}, (2, 1 / 16, 2, 1 / 16, 3), {TRUNCATED: [0, 0, 0, 0, 1]}),
    (correction.icepop, {"low": 0.3, "high": 5}, (4, 0, 1 / 2, 0, 0), {MASKED: [0, 1, 0, 1, 1]}),
    (correction.mis, {"low": 0.1, "high": 5}, (2, 0, 2, 0, 0), {MASKED: [0, 1, 0, 1, 1]}),
    # sequence 0 stays: its mean 1.414 is below 1.5 though its product 2 is not
    (
        correction.geometric_mask,
        {"low": 0.3, "high": 1.5},
        (1, 0, 1, 0, 0),
        {MASKED: [0, 1, 0, 1, 1]},
    ),
]


def rows(old, mu, ids, num_sequences):
    unread = torch.full_like(old, torch.nan)
    ids = torch.tensor(ids)
    return Tokens.by_hand(
        unread, mu, unread, old_logprobs=old, sequence_ids=ids, num_sequences=num_sequences
    )


@pytest.mark.parametrize(("function", "options", "weights", "metrics"), TABLE)
def test_correction_weights(function, options, weights, metrics):
    old_logprobs = torch.tensor(OLD, dtype=torch.float64).log().requires_grad_()
    rollout_logprobs = torch.tensor(MU, dtype=torch.float64).log()
    out = function(rows(old_logprobs, rollout_logprobs, IDS, 4), **options)
    assert not out.weights.requires_grad
    torch.testing.assert_close(out.weights, torch.tensor(weights, dtype=torch.float64))
    assert {name: values.tolist() for name, values in out.metrics.items()} == metrics


def test_a_token_of_impossible_probability_keeps_every_weight_finite():
    old_logprobs, rollout_logprobs = torch.tensor([-900.0, -1.0]), torch.tensor([-1.0, -900.0])
    for function in (
        partial(correction.tis_token, cap=1e30),
        partial(correction.tis_sequence, cap=1e30),
        partial(correction.icepop, low=0.0, high=1e30),
        partial(correction.mis, low=0.0, high=1e30),
    ):
        out = function(rows(old_logprobs, rollout_logprobs, [0, 1], 2))
        expected = torch.tensor([E_20, E20])
        torch.testing.assert_close(out.weights, expected)


def test_a_ratio_equal_to_the_cap_or_to_the_bounds_is_kept_and_not_counted():
    cap, bounds, logprobs = {"cap": 1.0}, {"low": 1.0, "high": 1.0}, -torch.ones(1)
    options = dict.fromkeys(("tis_token", "tis_sequence"), cap)
    options |= dict.fromkeys(("icepop", "mis", "geometric_mask"), bounds)
    for name, given in options.items():
        out = getattr(correction, name)(rows(logprobs, logprobs, [0], 1), **given)
        assert out.weights.tolist() == [1.0]
        assert [float(values) for values in out.metrics.values()] == [0.0]
