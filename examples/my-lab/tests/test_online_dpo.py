"""Compare value and gradient of online DPO with a table worked by hand."""

import math

import pytest
import torch
from splits import check_order_and_splits

from losses.tokens import Tokens
from my_lab.online_dpo import OnlineDPO, pairs

LN2, LN3 = math.log(2), math.log(3)
# rollout, group, advantage, log pi - log ref. With beta=1:
# group 0: best 0, worst 1. Margins ln 2 + 0 and -ln 2 + ln 2. -log sigmoid(ln 2) = ln(3/2), and
#          its derivative is 1 / (1 + 2)
# group 1: best 4, worst 2, and 3 in no pair. Margins 0 and ln 3: loss ln(1 + 3), derivative 3/4
# group 2 has one rollout, and group 3 has equal advantages: no pair
TABLE = [
    (0, 0, 0.5, LN2, math.log(1.5) / 2, -1 / 3),
    (1, 0, -0.5, -LN2, math.log(1.5) / 2, 1 / 3),
    (0, 0, 0.5, 0.0, math.log(1.5) / 2, -1 / 3),
    (1, 0, -0.5, LN2, math.log(1.5) / 2, 1 / 3),
    (2, 1, -1.0, LN3, math.log(4) / 2, 3 / 4),
    (3, 1, 0.0, 5.0, 0.0, 0.0),
    (4, 1, 1.0, 0.0, math.log(4) / 2, -3 / 4),
    (5, 2, 7.0, 1.0, 0.0, 0.0),
    (6, 3, 0.0, 1.0, 0.0, 0.0),
    (7, 3, 0.0, -1.0, 0.0, 0.0),
]


def tokens_of(table: list[tuple[float, ...]]) -> Tokens:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*table, strict=True)]
    rollouts, groups, advantages, gaps = columns[:4]
    ref = torch.full_like(gaps, -1.0)
    return Tokens.by_hand(
        (ref + gaps).requires_grad_(),
        ref,
        advantages,
        ref_logprobs=ref,
        rollout_ids=rollouts.long() + 100,  # ids of the batch, not of the micro-batch
        group_ids=groups.long(),
    )


def test_value_and_gradient_of_each_token() -> None:
    tokens = tokens_of(TABLE)
    out = OnlineDPO(beta=1.0)(tokens)
    assert out.loss.tolist() == pytest.approx([row[4] for row in TABLE])
    # The halves add up to the pair's loss if each rollout counts once, as in sequence_mean.
    lengths = torch.bincount(tokens.rollout_ids)[tokens.rollout_ids]
    (out.loss / lengths).sum().backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([row[5] for row in TABLE])
    assert out.metrics["paired"].tolist() == [float(row[4] > 0) for row in TABLE]


def test_groups_in_separate_micro_batches_and_in_any_order_have_the_same_loss() -> None:
    check_order_and_splits(OnlineDPO(beta=0.3), tokens_of, TABLE)


def test_a_micro_batch_without_pairs_still_has_a_gradient_of_zero() -> None:
    tokens = tokens_of(TABLE[7:])
    OnlineDPO(beta=1.0)(tokens).loss.sum().backward()
    assert tokens.logprobs.grad is not None
    assert not tokens.logprobs.grad.any()
    empty = torch.zeros(0)
    assert not pairs(empty, empty)
