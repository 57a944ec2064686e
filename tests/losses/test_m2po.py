"""M2PO by hand: the bound follows from all tokens, however they are split."""

import math
from dataclasses import replace

import pytest
import torch

from losses.m2po import M2PO
from losses.tokens import Tokens
from tests.losses.test_loss_invariances import a_batch, assert_same, pick

LN2 = math.log(2)


def loss_of(max_second_moment: float):
    loss = M2PO(max_second_moment=max_second_moment)
    return lambda tokens: loss(tokens, loss.statistics(tokens).detach())


# pi, anchor, advantage: log ratios 0, ln 2, -2 ln 2, 3 ln 2. Squares in units of (ln 2)^2: 0, 1, 4,
# 9, so the means of the smallest are 0, 1/2, 5/3, 14/4
TOKENS = [(1 / 2, 1 / 2, 1.0), (1 / 2, 1 / 4, -1.0), (1 / 8, 1 / 2, 2.0), (1 / 2, 1 / 16, 1.0)]
LOSSES = [-1.0, 2.0, -0.5, -8.0]  # -A r, and so is the gradient


@pytest.mark.parametrize(
    ("bound", "kept"), [(4.0, 4), (3.49, 3), (1.7, 3), (1.6, 2), (0.51, 2), (0.49, 1), (1e-9, 1)]
)
def test_the_tokens_that_moved_most_are_dropped_until_the_mean_square_is_small(
    check_table, bound: float, kept: int
) -> None:
    rows = [
        (*token, loss * (i < kept), loss * (i < kept))
        for i, (token, loss) in enumerate(zip(TOKENS, LOSSES, strict=True))
    ]
    masked = [float(i >= kept) for i in range(4)]
    check_table(loss_of(bound * LN2**2), rows, masked_fraction=masked)


def test_all_tokens_of_one_bin_are_kept_or_dropped(check_table) -> None:
    rows = [(1 / 2, 1 / 4, 1.0, 0.0, 0.0), (1 / 4, 1 / 2, 1.0, 0.0, 0.0)]
    check_table(loss_of(0.9 * LN2**2), rows, masked_fraction=[1, 1])
    rows = [(1 / 2, 1 / 4, 1.0, -2.0, -2.0), (1 / 4, 1 / 2, 1.0, -0.5, -0.5)]
    check_table(loss_of(1.1 * LN2**2), rows, masked_fraction=[0, 0])


def test_a_batch_without_tokens_has_no_loss() -> None:
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    tokens = Tokens.by_hand(empty, empty.detach(), empty.detach())
    assert loss_of(0.04)(tokens).loss.shape == (0,)


def test_no_split_and_no_order_changes_the_loss() -> None:
    tokens, loss = a_batch(), M2PO(max_second_moment=0.3)
    whole = loss.statistics(tokens)
    expected = loss(tokens, whole)
    assert 0.1 < expected.metrics["masked_fraction"].mean() < 0.9
    shuffled = torch.randperm(len(expected.loss), generator=torch.Generator().manual_seed(2))
    parts = shuffled.split(11)
    total = torch.stack([loss.statistics(pick(tokens, part)) for part in parts]).sum(0)
    assert_same(total, whole)
    for part in parts:
        assert_same(loss(pick(tokens, part), total).loss, expected.loss[part])
    older = replace(tokens, old_logprobs=tokens.rollout_logprobs, rollout_logprobs=tokens.logprobs)
    assert_same(loss(older, loss.statistics(older)).loss, expected.loss)


def test_a_nan_of_one_token_reaches_its_loss_so_that_the_step_is_skipped() -> None:
    tokens = Tokens.by_hand(torch.tensor([math.nan, -1.0]), -torch.ones(2), torch.ones(2))
    assert loss_of(0.04)(tokens).loss.isnan().tolist() == [True, False]
