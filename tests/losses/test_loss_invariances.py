"""The loss of a sequence does not depend on the rest of the batch, in float64 to 1e-12.

tests/rl/learner/test_objective.py proves the same of the whole objective with every shipped loss.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from losses.by_source import by_source
from losses.cispo import cispo
from losses.cross_entropy import cross_entropy
from losses.decoupled_ppo import decoupled_ppo
from losses.distill import distill
from losses.dppo import dppo
from losses.gspo import gspo
from losses.masked_is import masked_is
from losses.ppo_clip import ppo_clip
from losses.reinforce import reinforce
from losses.sapo import sapo
from losses.tokens import TokenLoss, Tokens
from losses.top_entropy import top_entropy

LOSSES: dict[str, Callable[[Tokens], TokenLoss]] = {
    "cispo": partial(cispo, clip_low=0.0, clip_high=2.0),
    "ppo_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": partial(gspo, clip_low=0.1, clip_high=0.1),
    "masked_is": partial(masked_is, ratio_low=0.125, ratio_high=8.0),
    "dppo": partial(dppo, delta_low=0.2, delta_high=0.2, tau=1e-3),
    "reinforce": reinforce,
    "sapo": partial(sapo, tau_positive=1.0, tau_negative=1.05),
    "cross_entropy": cross_entropy,
    "distill": distill,
    "by_source": partial(
        by_source, policy_loss=partial(cispo, clip_low=0.0, clip_high=5.0), demonstration_weight=0.5
    ),
    "top_entropy": partial(top_entropy, fraction=0.3, clip_low=0.2, clip_high=0.28, dual_clip=None),
    "decoupled_ppo": partial(decoupled_ppo, clip_low=0.2, clip_high=0.2, weight_cap=2.0),
}
LENGTHS = [5, 1, 9, 0, 3, 12, 2, 7]
every_loss = pytest.mark.parametrize("loss", LOSSES)
assert_same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def a_batch(seed: int = 0) -> Tokens:
    """Return sequences of LENGTHS tokens, with ratios on both sides of every bound."""
    random = torch.Generator().manual_seed(seed)
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


def pick(tokens: Tokens, index: Tensor) -> Tokens:
    """Return the tokens at index as a micro-batch, with sequences renumbered from 0."""
    present, ids = tokens.sequence_ids[index].unique(return_inverse=True)
    picked = {k: v[index] for k, v in vars(tokens).items() if isinstance(v, Tensor)}
    return Tokens(**(picked | {"sequence_ids": ids, "num_sequences": len(present)}))


def derivative(loss: str, tokens: Tokens) -> tuple[TokenLoss, Tensor]:
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
        free = partial(dppo, delta_low=2.0, delta_high=2.0, tau=1e-3)
        assert_same(free(as_old).loss, free(as_mu).loss)
    elif loss != "decoupled_ppo":  # see test_watchful_losses.py, because it corrects for the anchor
        assert_same(LOSSES[loss](as_old).loss, LOSSES[loss](as_mu).loss)
