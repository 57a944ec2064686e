"""The ratio shared by the losses: its anchor, its clamp, and means over sequences."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from losses.tokens import Tokens, log_ratio, mean_per_sequence, ratio_to, sum_per_sequence
from rl.config.build import build
from tests.support.composing import chosen


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens_of(logprobs: Tensor, rollout_logprobs: Tensor) -> Tokens:
    advantages = -torch.ones_like(rollout_logprobs)
    return Tokens.by_hand(logprobs, rollout_logprobs, advantages)


def test_the_anchor_is_the_sampling_policy_unless_an_older_one_is_given():
    tokens = tokens_of(vector(-1.0), vector(-2.0))
    torch.testing.assert_close(tokens.anchor, vector(-2.0))
    torch.testing.assert_close(replace(tokens, old_logprobs=vector(-3.0)).anchor, vector(-3.0))


def test_the_anchor_carries_no_gradient():
    tokens = tokens_of(vector(-1.0), vector(-2.0).requires_grad_())
    assert not tokens.anchor.requires_grad
    assert not replace(tokens, old_logprobs=vector(-3.0).requires_grad_()).anchor.requires_grad


def test_a_clamped_ratio_is_bounded_has_no_gradient_and_is_counted():
    logprobs = vector(-1.0, -31.0, -1.0, -1.0).requires_grad_()
    tokens = tokens_of(logprobs, vector(-31.0, -1.0, -2.0, -21.0))  # log ratios 30, -30, 1, 20
    torch.testing.assert_close(log_ratio(tokens.anchor, logprobs), vector(20.0, -20.0, 1.0, 20.0))
    ratio = ratio_to(tokens.anchor, logprobs)
    e, e20 = 2.718281828459045, 485165195.4097903
    torch.testing.assert_close(ratio, vector(e20, 2.061153622438558e-9, e, e20))
    ratio.sum().backward()
    torch.testing.assert_close(logprobs.grad, vector(0.0, 0.0, e, e20))
    torch.testing.assert_close(tokens.ratio_clamped, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    old = replace(tokens, old_logprobs=vector(-1.0, -1.0, -22.0, -1.0))  # log ratios 0, -30, 21, 0
    assert old.ratio_clamped.tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("loss", "clamped"),
    [
        *((loss, [1, 0, 0, 0]) for loss in ("cispo", "grpo", "sapo", "masked_is", "dppo")),
        ("decoupled_ppo", [0, 0, 0, 0]),  # its anchor lies between the policies
        ("gspo", [0, 0, 1, 1]),  # mean log ratios of 12.5 and 22 in its two sequences
        *((loss, None) for loss in ("reinforce", "sft", "distill")),
    ],
)
def test_a_loss_reports_the_tokens_whose_ratio_it_clamps_itself(loss, clamped):
    pi = vector(-1.0, -1.0, -0.5, -0.5)
    # Log ratios 20.5, 4.5, and 19.9, 24.1 or 0.5, 1.5.
    mu = vector(-21.5, -5.5, *((-20.4, -24.6) if loss == "gspo" else (-1.0, -2.0)))
    tokens = Tokens.by_hand(
        pi.requires_grad_(),
        mu,
        vector(1.0, 1.0, -1.0, -1.0),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        num_sequences=2,
        staleness=torch.ones(4, dtype=torch.int64),
        ref_logprobs=mu,
    )
    found = build(chosen("loss", loss))(tokens).ratio_clamped
    assert (found if found is None else found.tolist()) == clamped


def test_sums_and_means_per_sequence_take_tokens_in_any_order_and_empty_sequences():
    ids = torch.tensor([2, 0, 2, 2])  # sequence 1 has no token
    values = vector(1.0, 5.0, 2.0, 6.0).requires_grad_()
    torch.testing.assert_close(sum_per_sequence(values, ids, 3), vector(5.0, 0.0, 9.0))
    means = mean_per_sequence(values, ids, 3)
    torch.testing.assert_close(means, vector(5.0, 0.0, 3.0))
    (means * vector(1.0, 1.0, 6.0)).sum().backward()
    torch.testing.assert_close(values.grad, vector(2.0, 1.0, 2.0, 2.0))
