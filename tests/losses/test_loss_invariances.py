"""Every loss is invariant to the split and the order of a batch, in float64 to 1e-12.

The objective here is the definition, sum over tokens of w_t * loss_t with w from the global batch.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from losses import aggregation
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
    "top_entropy": partial(top_entropy, fraction=0.3, clip_low=0.2, clip_high=0.28, dual_clip=None),
    "decoupled_ppo": partial(decoupled_ppo, clip_low=0.2, clip_high=0.2, weight_cap=2.0),
}
AGGREGATIONS: dict[str, Callable[..., list[float]]] = {
    "token_mean": aggregation.token_mean,
    "sequence_mean": aggregation.sequence_mean,
    "constant_length": partial(aggregation.constant_length, length=16),
    "prompt_mean": aggregation.prompt_mean,
}
LENGTHS = [5, 1, 9, 0, 3, 12, 2, 7]
GROUP_IDS = [0, 0, 0, 1, 1, 2, 2, 2]
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_aggregation = pytest.mark.parametrize("aggregate", AGGREGATIONS)
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
    )


def pick(tokens: Tokens, index: Tensor) -> Tokens:
    """Return the tokens at index as a micro-batch, with sequences renumbered from 0."""
    present, ids = tokens.sequence_ids[index].unique(return_inverse=True)
    picked = {k: v[index] for k, v in vars(tokens).items() if isinstance(v, Tensor)}
    return Tokens(**(picked | {"sequence_ids": ids, "num_sequences": len(present)}))


def objective(
    loss: str, tokens: Tokens, weights: Tensor, micro_batches: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return value and gradient [N] in log pi of the sum of w_t loss_t over the micro-batches.

    weights: [N], of tokens. micro_batches: which tokens each one has.
    """
    leaf = tokens.logprobs.detach().clone().requires_grad_()
    tokens = Tokens(**{**vars(tokens), "logprobs": leaf})
    total = torch.zeros((), dtype=torch.float64)
    for index in micro_batches:
        out = LOSSES[loss](pick(tokens, index))
        total = total + (weights[index] * out.loss).sum()
    total.backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def token_weights(aggregate: str, tokens: Tokens) -> Tensor:
    per_sequence = AGGREGATIONS[aggregate](LENGTHS, GROUP_IDS)
    return torch.tensor(per_sequence, dtype=torch.float64)[tokens.sequence_ids]


def whole(tokens: Tokens) -> list[Tensor]:
    return [torch.arange(len(tokens.logprobs))]


@every_loss
@every_aggregation
def test_no_split_into_micro_batches_changes_value_or_gradient(loss, aggregate):
    tokens = a_batch()
    weights = token_weights(aggregate, tokens)
    expected = objective(loss, tokens, weights, whole(tokens))
    assert expected[1].abs().sum() > 0.01
    random = torch.Generator().manual_seed(1)
    for num_micro_batches in (2, 3, 5, len(LENGTHS)):
        where = torch.randint(num_micro_batches, (len(LENGTHS),), generator=random)
        split = [
            (where[tokens.sequence_ids] == m).nonzero()[:, 0] for m in range(num_micro_batches)
        ]
        assert_same(objective(loss, tokens, weights, split), expected)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("gspo", "top_entropy")])
def test_a_token_level_loss_may_be_split_within_a_sequence(loss):
    tokens = a_batch()
    weights = token_weights("sequence_mean", tokens)
    expected = objective(loss, tokens, weights, whole(tokens))
    shuffled = torch.randperm(len(weights), generator=torch.Generator().manual_seed(2))
    split = list(shuffled.split(4))
    assert_same(objective(loss, tokens, weights, split), expected)


@every_loss
def test_tokens_may_come_in_any_order_with_their_ids(loss):
    tokens = a_batch()
    weights = token_weights("sequence_mean", tokens)
    expected = objective(loss, tokens, weights, whole(tokens))
    for seed in range(3):
        order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed))
        assert_same(objective(loss, tokens, weights, [order]), expected)
        assert_same(LOSSES[loss](pick(tokens, order)).loss, LOSSES[loss](tokens).loss[order])


@every_loss
def test_a_sequence_alone_is_what_it_is_in_a_batch(loss):
    tokens = a_batch()
    together = LOSSES[loss](tokens)
    for i in range(len(LENGTHS)):
        index = (tokens.sequence_ids == i).nonzero()[:, 0]
        alone = LOSSES[loss](pick(tokens, index))
        assert_same(alone.loss, together.loss[index])
        for name, metric in together.metrics.items():
            assert_same(alone.metrics[name], metric[index])


@every_loss
def test_a_sequence_with_nan_does_not_affect_the_others(loss):
    tokens = a_batch()
    sound = tokens.sequence_ids != 0
    broken = torch.where(sound, tokens.logprobs, torch.nan)
    weights = torch.ones_like(broken)
    _, expected = objective(loss, tokens, weights, whole(tokens))
    tokens_with_nan = Tokens(**{**vars(tokens), "logprobs": broken})
    _, gradient = objective(loss, tokens_with_nan, weights, whole(tokens))
    assert_same(gradient[sound], expected[sound])


@every_loss
def test_a_loss_returns_one_value_per_token_and_metrics_without_gradient(loss):
    tokens = a_batch()
    leaf = tokens.logprobs.requires_grad_()
    out = LOSSES[loss](Tokens(**{**vars(tokens), "logprobs": leaf}))
    assert out.loss.shape == leaf.shape
    assert out.loss.requires_grad
    for metric in out.metrics.values():
        assert metric.shape == leaf.shape
        assert not metric.requires_grad


@every_loss
def test_the_older_policy_replaces_the_sampling_one_as_anchor(loss):
    tokens = a_batch()
    shifted = tokens.rollout_logprobs - 0.5
    as_old = Tokens(**{**vars(tokens), "old_logprobs": shifted})
    as_mu = Tokens(**{**vars(tokens), "rollout_logprobs": shifted})
    if loss == "dppo":  # drops by the distance from mu, so use bounds that drop nothing
        free = partial(dppo, delta_low=2.0, delta_high=2.0, tau=1e-3)
        assert_same(free(as_old).loss, free(as_mu).loss)
    elif loss != "decoupled_ppo":  # see test_watchful_losses.py, because it corrects for the anchor
        assert_same(LOSSES[loss](as_old).loss, LOSSES[loss](as_mu).loss)


@every_loss
def test_an_empty_micro_batch_is_a_zero_with_a_gradient(loss):
    tokens = pick(a_batch(), torch.arange(0))
    leaf = tokens.logprobs.detach().requires_grad_()
    total = LOSSES[loss](Tokens(**{**vars(tokens), "logprobs": leaf})).loss.sum()
    total.backward()
    assert_same(total, torch.zeros((), dtype=torch.float64))
