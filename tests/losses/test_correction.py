"""Correction weights against numbers worked by hand."""

from functools import partial

import pytest
import torch

from losses import correction
from losses.tokens import Tokens

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
        expected = torch.tensor([2.061153622438558e-9, 485165195.4097903])  # e^-20, e^20
        torch.testing.assert_close(out.weights, expected)


def test_a_ratio_equal_to_the_cap_or_to_the_bounds_is_kept_and_not_counted():
    cap, bounds, logprobs = {"cap": 1.0}, {"low": 1.0, "high": 1.0}, -torch.ones(1)
    options = dict.fromkeys(("tis_token", "tis_sequence"), cap)
    options |= dict.fromkeys(("icepop", "mis", "geometric_mask"), bounds)
    for name, given in options.items():
        out = getattr(correction, name)(rows(logprobs, logprobs, [0], 1), **given)
        assert out.weights.tolist() == [1.0]
        assert [float(values) for values in out.metrics.values()] == [0.0]
