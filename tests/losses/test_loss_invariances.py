"""The ratio of the losses, and a sequence's independence of the rest of the batch.

tests/rl/learner/test_objective.py proves the same of the whole objective with every shipped loss.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from losses.m2po import M2PO
from losses.tokens import Tokens, log_ratio, mean_per_sequence, ratio_to, sum_per_sequence
from rl.config.build import build
from tests.support.composing import chosen

OPTIONS = {
    "cispo": {"clip_low": 0.0, "clip_high": 2.0},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "masked_is": {"ratio_low": 0.125, "ratio_high": 8.0},
    "dppo": {"delta_low": 0.2, "delta_high": 0.2, "tau": 1e-3},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "sft_and_rl": {"demonstration_weight": 0.5},
    "top_entropy": {"fraction": 0.3, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "decoupled_ppo": {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 2.0},
    "reinforce": {},
    "sft": {},
    "distill": {},
}
LOSSES = {name: build(chosen("loss", name) | options) for name, options in OPTIONS.items()}
LENGTHS = [5, 1, 9, 0, 3, 12, 2, 7]
every_loss = pytest.mark.parametrize("loss", LOSSES)
assert_same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def a_batch():
    """Return sequences of LENGTHS tokens, with ratios on both sides of every bound."""
    random = torch.Generator().manual_seed(0)
    num_tokens = sum(LENGTHS)
    draw = partial(torch.randn, num_tokens, generator=random, dtype=torch.float64)
    mu = -draw().abs() - 0.05
    per_sequence = torch.randn(len(LENGTHS), generator=random, dtype=torch.float64)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return Tokens(
        logprobs=(mu + 0.8 * draw()).clamp(max=-1e-3),
        rollout_logprobs=mu,
        advantages=per_sequence[ids],
        sequence_ids=ids,
        num_sequences=len(LENGTHS),
        ref_logprobs=mu + 0.3 * draw(),
        staleness=torch.randint(0, 4, (num_tokens,), generator=random),
        entropies=draw().abs(),
        positions=torch.cat([torch.arange(length) for length in LENGTHS]),
        turns=torch.cat([torch.arange(length) // 3 for length in LENGTHS]),
        rollout_ids=ids,
        group_ids=ids // 4,
        source=ids % 3,
    )


def pick(tokens, index):
    """Return the tokens at index as a micro-batch, with sequences renumbered from 0."""
    present, ids = tokens.sequence_ids[index].unique(return_inverse=True)
    picked = {k: v[index] for k, v in vars(tokens).items() if isinstance(v, Tensor)}
    return Tokens(**(picked | {"sequence_ids": ids, "num_sequences": len(present)}))


def derivative(loss, tokens):
    """Return the result of a loss, and the gradient [N] of its sum in log pi."""
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    out = LOSSES[loss](replace(tokens, logprobs=leaf))
    (gradient,) = torch.autograd.grad(out.loss.sum(), leaf)
    return out, gradient


@every_loss
def test_a_sequence_has_the_same_loss_alone_in_a_batch_and_in_any_order(loss):
    """One of the sequences is empty. So all splits into whole sequences add up to the same."""
    tokens = a_batch()
    expected, gradient = derivative(loss, tokens)
    assert gradient.abs().sum() > 0.01
    shuffled = torch.randperm(len(gradient), generator=torch.Generator().manual_seed(2))
    alone = [(tokens.sequence_ids == i).nonzero()[:, 0] for i in range(len(LENGTHS))]
    for index in (shuffled, *alone):
        found, part = derivative(loss, pick(tokens, index))
        assert found.loss.shape == index.shape
        assert_same(found.loss, expected.loss[index])
        assert_same(part, gradient[index])
        assert found.metrics.keys() == expected.metrics.keys()
        for name, metric in found.metrics.items():
            assert not metric.requires_grad
            assert_same(metric, expected.metrics[name][index])


@every_loss
def test_a_sequence_with_nan_does_not_affect_the_others(loss):
    tokens = a_batch()
    sound = tokens.sequence_ids != 0
    broken = replace(tokens, logprobs=torch.where(sound, tokens.logprobs, torch.nan))
    assert_same(derivative(loss, broken)[1][sound], derivative(loss, tokens)[1][sound])


@every_loss
def test_the_older_policy_replaces_the_sampling_one_as_anchor(loss):
    tokens = a_batch()
    shifted = tokens.rollout_logprobs - 0.5
    as_old, as_mu = replace(tokens, old_logprobs=shifted), replace(tokens, rollout_logprobs=shifted)
    if loss == "dppo":  # drops by the distance from mu, so use bounds that drop nothing
        free = build(chosen("loss", "dppo") | {"delta_low": 2.0, "delta_high": 2.0, "tau": 1e-3})
        assert_same(free(as_old).loss, free(as_mu).loss)
    elif loss != "decoupled_ppo":  # see test_token_losses.py, because it corrects for the anchor
        assert_same(LOSSES[loss](as_old).loss, LOSSES[loss](as_mu).loss)


def test_no_split_and_no_order_changes_m2po():
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


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_anchor_is_the_sampling_policy_unless_an_older_one_is_given_and_has_no_gradient():
    logprobs, mu, old = vector(-1.0), vector(-2.0).requires_grad_(), vector(-3.0).requires_grad_()
    tokens = Tokens.by_hand(logprobs, mu, -torch.ones(1))
    for each, expected in ((tokens, mu), (replace(tokens, old_logprobs=old), old)):
        torch.testing.assert_close(each.anchor, expected.detach())
        assert not each.anchor.requires_grad


def test_a_clamped_ratio_is_bounded_has_no_gradient_and_is_counted():
    logprobs = vector(-1.0, -31.0, -1.0, -1.0).requires_grad_()
    mu = vector(-31.0, -1.0, -2.0, -21.0)  # log ratios 30, -30, 1, 20
    tokens = Tokens.by_hand(logprobs, mu, -torch.ones(4))
    torch.testing.assert_close(log_ratio(tokens.anchor, logprobs), vector(20.0, -20.0, 1.0, 20.0))
    ratio = ratio_to(tokens.anchor, logprobs)
    e, e20 = 2.718281828459045, 485165195.4097903
    torch.testing.assert_close(ratio, vector(e20, 2.061153622438558e-9, e, e20))
    ratio.sum().backward()
    torch.testing.assert_close(logprobs.grad, vector(0.0, 0.0, e, e20))
    torch.testing.assert_close(tokens.ratio_clamped, torch.tensor([1.0, 1.0, 0.0, 0.0]))
    old = replace(tokens, old_logprobs=vector(-1.0, -1.0, -22.0, -1.0))  # log ratios 0, -30, 21, 0
    assert old.ratio_clamped.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_sums_and_means_per_sequence_take_tokens_in_any_order_and_empty_sequences():
    ids = torch.tensor([2, 0, 2, 2])  # sequence 1 has no token
    values = vector(1.0, 5.0, 2.0, 6.0).requires_grad_()
    torch.testing.assert_close(sum_per_sequence(values, ids, 3), vector(5.0, 0.0, 9.0))
    means = mean_per_sequence(values, ids, 3)
    torch.testing.assert_close(means, vector(5.0, 0.0, 3.0))
    (means * vector(1.0, 1.0, 6.0)).sum().backward()
    torch.testing.assert_close(values.grad, vector(2.0, 1.0, 2.0, 2.0))
