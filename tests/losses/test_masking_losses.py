"""The losses that drop tokens against numbers worked by hand, one row for each branch."""

from functools import partial

import torch

from losses.dppo import dppo
from losses.masked_is import masked_is
from losses.tokens import Tokens

LN2 = 0.6931471805599453  # -log(1/2)


def test_masked_is_drops_tokens_below_and_above_the_bounds(check_table):
    rows = [  # band [1/8, 8]; inside: loss = -A r, gradient = -A r
        (1 / 2, 1 / 4, 1.0, -2.0, -2.0),  # ratio 2
        (1 / 2, 1 / 4, -1.0, 2.0, 2.0),  # ratio 2, pushed down
        (1 / 2, 1 / 32, 1.0, 0.0, 0.0),  # ratio 16, above
        (1 / 2, 1 / 32, -1.0, 0.0, 0.0),  # ratio 16, above, whatever the direction
        (1 / 32, 1 / 2, 1.0, 0.0, 0.0),  # ratio 1/16, below
    ]
    check_table(
        partial(masked_is, ratio_low=0.125, ratio_high=8.0),
        rows,
        masked_fraction=[0, 0, 1, 1, 1],
        masked_fraction_low=[0, 0, 0, 0, 1],
        masked_fraction_high=[0, 0, 1, 1, 0],
    )


def test_masked_is_keeps_a_ratio_equal_to_a_bound(check_table):
    rows = [(1 / 2, 1 / 2, 1.0, -1.0, -1.0)]  # ratio 1 in [1, 1]
    none = {"masked_fraction": [0], "masked_fraction_low": [0], "masked_fraction_high": [0]}
    check_table(partial(masked_is, ratio_low=1.0, ratio_high=1.0), rows, **none)


def test_dppo_drops_by_moved_probability_and_penalises_every_ratio(check_table):
    q = LN2 * LN2  # (log ratio)^2 of ratio 2 or 1/2
    rows = [  # loss = -A r + 0.1 (log r)^2, gradient = -A r + 0.2 log r; dropped: without -A r
        (1 / 2, 1 / 4, 1.0, 0.1 * q, 0.2 * LN2),  # moved +1/4 > 0.2, rising on: dropped
        (1 / 2, 1 / 4, -1.0, 2.0 + 0.1 * q, 2.0 + 0.2 * LN2),  # +1/4, to be lowered: kept
        (1 / 4, 1 / 2, -1.0, 0.1 * q, -0.2 * LN2),  # moved -1/4 < -0.2, falling on: dropped
        (1 / 4, 1 / 2, 1.0, -0.5 + 0.1 * q, -0.5 - 0.2 * LN2),  # -1/4, to be raised: kept
        (1 / 4, 1 / 2, 0.0, 0.1 * q, -0.2 * LN2),  # A = 0 goes with the falling ones
        # ratio 8 is far outside any ratio clip, but 1/8 - 1/64 = 0.11 is a small move: kept
        (1 / 8, 1 / 64, 1.0, -8.0 + 0.9 * q, -8.0 + 0.6 * LN2),
        (1 / 8, 1 / 4, -1.0, 0.5 + 0.1 * q, 0.5 - 0.2 * LN2),  # -1/8: kept
    ]
    check_table(
        partial(dppo, delta_low=0.2, delta_high=0.2, tau=0.1),
        rows,
        masked_fraction=[1, 0, 1, 0, 1, 0, 0],
        masked_fraction_low=[0, 0, 1, 0, 1, 0, 0],
        masked_fraction_high=[1, 0, 0, 0, 0, 0, 0],
    )


def test_dppo_measures_the_move_from_the_policy_that_sampled():
    # pi = 1/2, old = 1/2, mu = 1/8: ratio to old 1, but 3/8 above mu: dropped
    half, eighth = torch.tensor([-LN2]), torch.tensor([-3 * LN2])
    tokens = Tokens.by_hand(half, eighth, torch.tensor([1.0]), old_logprobs=half)
    out = dppo(tokens, delta_low=0.2, delta_high=0.2, tau=0.1)
    torch.testing.assert_close(out.loss, torch.tensor([0.0]))
    torch.testing.assert_close(out.metrics["masked_fraction_high"], torch.tensor([1.0]))


def test_dppo_bounds_differ_by_direction(check_table):
    q = LN2 * LN2
    rows = [  # tau = 1: loss = -A r + (log r)^2, gradient = -A r + 2 log r
        (1 / 2, 1 / 4, 1.0, -2.0 + q, -2.0 + 2 * LN2),  # +1/4 < 0.3: kept
        (1 / 4, 1 / 2, -1.0, q, -2 * LN2),  # -1/4 < -0.1: dropped
    ]
    check_table(
        partial(dppo, delta_low=0.1, delta_high=0.3, tau=1.0),
        rows,
        masked_fraction=[0, 1],
        masked_fraction_low=[0, 1],
        masked_fraction_high=[0, 0],
    )
