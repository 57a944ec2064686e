"""Value and gradient of the objective do not depend on how the batch is split, in float64."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from losses import aggregation
from losses.correction import tis_sequence
from losses.kl import k3
from losses.tokens import TokenLoss
from rl.config.build import component
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, with_outputs
from rl.records import MicroBatch
from rl.rollouts.plan import plan, weighted_rows
from tests.support import tiny_policy
from tests.support.composing import CONF, chosen, composed
from tests.support.summed_objective import SummedObjective as Objective

torch.set_num_threads(1)

AGGREGATIONS = {
    "token_mean": aggregation.token_mean,
    "sequence_mean": aggregation.sequence_mean,
    "constant_length": partial(aggregation.constant_length, length=17),
    "prompt_mean": aggregation.prompt_mean,
}
SHIPPED = [path.stem for path in (CONF / "loss").glob("*.yaml")]
SPLITS = [(1, 10_000), (1, 60), (1, 1), (2, 45), (3, 30), (3, 1)]  # ranks, tokens_per_micro_batch


def shipped(name):
    """The loss with the knobs of its YAML."""
    return component(chosen("loss", name))


def own_aggregation(name):
    return composed(f"loss={name}")["aggregation"]["_target_"].rpartition(".")[2]


def everything(loss, tokens, entropies):
    """tis_sequence on the loss of one row, beta 0.3 times k3, less 0.2 times the entropy."""
    weight = (tokens.old_logprobs - tokens.rollout_logprobs).sum().exp().clamp(max=1.05)
    k1 = tokens.logprobs - tokens.ref_logprobs
    return weight * loss + 0.3 * ((-k1).exp() + k1 - 1) - 0.2 * entropies


COMPOSED = {
    "correction": partial(tis_sequence, cap=1.05),
    "kl": KLPenalty(estimator=k3, beta=9.0, place="loss", target_kl=None),
    "entropy_bonus": 0.2,
}
# One loss for each function and aggregation: ppo_clip is shipped under several names.
OWN = {(chosen("loss", loss)["_target_"], own_aggregation(loss)): loss for loss in sorted(SHIPPED)}
CROSSED = ("cispo", "ppo_clip")
COMBINATIONS = [
    *((loss, name, "alone") for loss in CROSSED for name in AGGREGATIONS),
    *(
        (loss, name, "alone")
        for (target, name), loss in OWN.items()
        if target not in {chosen("loss", crossed)["_target_"] for crossed in CROSSED}
    ),
    ("ppo_clip", "token_mean", "composed"),
    ("cispo", "sequence_mean", "composed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_policy.model_folder(tmp_path_factory.mktemp("objective") / "model")
    return tiny_policy.exact_model(folder)


@pytest.fixture(scope="module")
def groups(model):
    return tiny_policy.groups(model)


def in_parts(model, rows, objective, *, old, ranks, budget):
    """Value and gradient, summed over micro-batches and ranks by hand."""
    module = PolicyModule(model, chunk=7, entropy_gradient=objective.entropy_bonus != 0)
    model.zero_grad()
    total, count = 0.0, 0
    shares = plan(rows, step=0, ranks=ranks, tokens_per_micro_batch=budget, metrics={})
    micros = [micro for share in shares for micro in share.micro_batches]
    batches = [
        tiny_policy.filled(Batch.of(micro, torch.device("cpu"), 0), old=old) for micro in micros
    ]

    def outputs(batch):
        given = (batch.token_ids, batch.mask, tiny_policy.TEMPERATURE)
        return module(*given, entropies=True, candidates=batch.candidates)

    if hasattr(objective.token_loss, "statistics"):
        seen = [with_outputs(batch, *outputs(batch)) for batch in batches]
        found = torch.stack([objective.token_loss.statistics(each) for each in seen]).sum(0)
        bound = partial(objective.token_loss, statistics=found.detach())
        objective = replace(objective, token_loss=bound)
    for batch in batches:
        logprobs, entropies, candidates = outputs(batch)
        value, metrics = objective(batch, logprobs, entropies, 0.3, candidates)
        value.backward()
        total += float(value.detach())
        count += 1
        assert all(m.shape == logprobs.shape and not m.requires_grad for m in metrics.values())
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    return total, gradient, count


@pytest.mark.parametrize(("loss", "weights", "how"), COMBINATIONS)
def test_value_and_gradient_are_the_same_for_every_split_and_order(
    model, groups, loss, weights, how
):
    composed = how == "composed"
    objective = Objective(shipped(loss), **(COMPOSED if composed else {}))
    rows = weighted_rows(groups, AGGREGATIONS[weights])
    extras = (everything, tiny_policy.fixed_old(rows)) if composed else (None, None)
    plain = tiny_policy.informed(model, rows, shipped(loss), old=extras[1])
    value, gradient = tiny_policy.reference(model, rows, plain, extras[0], old=extras[1])
    assert tiny_policy.flat(gradient).norm() > 0.01
    counts = set()
    for seed, (ranks, budget) in enumerate(SPLITS):
        shuffled = random.Random(seed).sample(groups, len(groups))
        rows = weighted_rows(shuffled, AGGREGATIONS[weights])
        total, found, count = in_parts(
            model, rows, objective, old=composed, ranks=ranks, budget=budget
        )
        assert total == pytest.approx(value, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
        counts.add(count)
    assert len(counts) > 3


def test_a_negative_bonus_minimises_the_entropy_itself(model, groups):
    objective = Objective(lambda tokens: TokenLoss(0 * tokens.logprobs, {}), entropy_bonus=-1.0)
    rows = weighted_rows(groups, aggregation.token_mean)

    def entropy_of(loss, tokens, entropies):
        return entropies

    value, gradient = tiny_policy.reference(model, rows, objective.token_loss, entropy_of)
    for ranks, budget in SPLITS:
        total, found, _ = in_parts(model, rows, objective, old=False, ranks=ranks, budget=budget)
        assert total == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
    head, generator = model.lm_head.weight, torch.Generator().manual_seed(0)
    direction = torch.randn(head.shape, generator=generator, dtype=head.dtype)
    values = []
    for step in (1e-4, -2e-4):
        head.data.add_(step * direction)
        values.append(tiny_policy.reference(model, rows, objective.token_loss, entropy_of)[0])
    head.data.add_(1e-4 * direction)
    slope = (gradient["model.embed_tokens.weight"] * direction).sum()
    assert slope.abs() > 0.01
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(float(slope), rel=1e-5)


def test_numbers_outside_of_the_completion_reach_neither_value_nor_gradient(model, groups):
    rows = weighted_rows(groups, aggregation.token_mean)
    (share,) = plan(rows, step=0, ranks=1, tokens_per_micro_batch=10_000, metrics={})
    (micro,) = share.micro_batches
    outside = ~micro.completion_mask
    spoilt_logprobs = np.where(outside, np.nan, micro.rollout_logprobs)
    beyond = np.cumsum(micro.completion_mask[:, ::-1], axis=1)[:, ::-1] == 0  # after the last one
    spoilt_ids = np.where(beyond, 99, micro.token_ids)
    empty = ~micro.completion_mask.any(axis=1)
    assert empty.any()
    spoilt = MicroBatch(
        **{
            **{name: getattr(micro, name) for name in micro.__dataclass_fields__},
            "token_ids": spoilt_ids,
            "rollout_logprobs": spoilt_logprobs,
            "advantages": np.where(outside, np.nan, micro.advantages),
        }
    )
    results = []
    for each in (micro, spoilt):
        batch = Batch.of(each, torch.device("cpu"), 0)
        module = PolicyModule(model, chunk=7)
        model.zero_grad()
        logprobs, entropies = module(batch.token_ids, batch.mask, 1.0, entropies=True)
        value, _ = Objective(shipped("cispo"))(batch, logprobs, entropies)
        value.backward()
        results.append(
            (float(value.detach()), {n: p.grad.clone() for n, p in model.named_parameters()})
        )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)
