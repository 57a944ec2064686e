"""Compare value and gradient of self-certainty with a table worked by hand."""

import math
from functools import partial

import pytest
import torch
from composing import composed
from splits import check_order_and_splits

from losses.ppo_clip import ppo_clip
from losses.tokens import Tokens
from my_lab.self_certainty import SelfCertainty
from rl.config.check import check

LN2 = math.log(2)
# rollout, group, KL(uniform || pi), log pi - log mu, u of the rollout, advantage of the rollout.
# group 0: u = 1 and 3, mean 2, std sqrt(2), so A = -+1 / sqrt(2)
# group 1: u = 1, 2 and 3, mean 2, std 1, so A = -1, 0 and 1
# group 2 has one rollout, and group 3 has equal u: A = 0
HALF = 1 / math.sqrt(2)
TABLE = [
    (0, 0, 0.5, 0.0, 1.0, -HALF),
    (1, 0, 3.0, 0.0, 3.0, HALF),
    (0, 0, 1.5, 0.0, 1.0, -HALF),
    (2, 1, 1.0, 0.0, 1.0, -1.0),
    (3, 1, 2.0, 0.0, 2.0, 0.0),
    (4, 1, 5.0, -LN2, 3.0, 1.0),  # ratio 1/2, within the bound for A > 0
    (4, 1, 1.0, LN2, 3.0, 1.0),  # ratio 2 -> 1.2, without gradient
    (5, 2, 7.0, 0.0, 7.0, 0.0),
    (6, 3, 2.0, 0.0, 2.0, 0.0),
    (7, 3, 2.0, 0.0, 2.0, 0.0),
]
RATIOS = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.2, 1.0, 1.0, 1.0]
LOSS = SelfCertainty(
    policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=None), epsilon=1e-12
)


def tokens_of(table: list[tuple[float, ...]]) -> Tokens:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*table, strict=True)]
    rollouts, groups, divergences, gaps = columns[:4]
    mu = torch.full_like(gaps, -1.0)
    return Tokens.by_hand(
        (mu + gaps).requires_grad_(),
        mu,
        torch.full_like(gaps, math.nan),  # advantages of the rewards, which the loss ignores
        kl_from_uniform=divergences,
        rollout_ids=rollouts.long() + 100,  # ids of the batch, not of the micro-batch
        group_ids=groups.long(),
    )


def test_value_and_gradient_of_each_token() -> None:
    tokens = tokens_of(TABLE)
    out = LOSS(tokens)
    expected = [-ratio * row[5] for ratio, row in zip(RATIOS, TABLE, strict=True)]
    assert out.loss.tolist() == pytest.approx(expected)
    assert out.metrics["self_certainty"].tolist() == [row[4] for row in TABLE]
    assert out.metrics["clip_fraction"].tolist() == [float(ratio == 1.2) for ratio in RATIOS]
    out.loss.sum().backward()
    expected[6] = 0.0
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx(expected)


def test_groups_in_separate_micro_batches_and_in_any_order_have_the_same_loss() -> None:
    check_order_and_splits(LOSS, tokens_of, TABLE)


def test_a_micro_batch_without_tokens_has_no_loss() -> None:
    empty = torch.zeros(0)
    ids = empty.long()
    tokens = Tokens.by_hand(
        empty, empty, empty, kl_from_uniform=empty, rollout_ids=ids, group_ids=ids
    )
    assert LOSS(tokens).loss.shape == (0,)


def test_it_goes_with_old_policies_and_with_several_updates_of_a_batch() -> None:
    check(composed("loss=self_certainty", "sampler=async", "updates_per_batch=2"))
