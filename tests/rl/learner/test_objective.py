"""Value and gradient of the objective do not depend on how the batch is split, in float64."""

import itertools
import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from losses import aggregation
from losses.correction import tis_sequence
from losses.kl import k3
from losses.tokens import TokenLoss, mean_per_sequence
from rl.config.build import component
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, with_outputs
from rl.records import Credit
from rl.rollouts.plan import plan, weighted_rows
from rl.runtime.failure import RunFailed
from tests.support import tiny_policy
from tests.support.composing import CONF, chosen, composed
from tests.support.tiny_policy import SummedObjective as Objective

torch.set_num_threads(1)

AGGREGATIONS = {
    name: getattr(aggregation, name) for name in ("token_mean", "sequence_mean", "prompt_mean")
} | {"constant_length": partial(aggregation.constant_length, length=17)}
SPLITS = [(1, 10_000), (1, 60), (1, 1), (2, 45), (3, 30), (3, 1)]  # ranks, tokens_per_micro_batch


def shipped(name):
    """The loss with the knobs of its YAML."""
    return component(chosen("loss", name))


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


def combinations():
    """Each function with the aggregations of its YAML files; two also composed."""
    own = {}
    for name in sorted(path.stem for path in (CONF / "loss").glob("*.yaml")):
        config = composed(f"loss={name}")
        function, weights = (
            config[k]["_target_"].rpartition(".")[2] for k in ("loss", "aggregation")
        )
        own[function, weights] = name
    yield from ((loss, weights, "alone") for (_, weights), loss in own.items())
    yield from (("ppo_clip", "token_mean", "composed"), ("cispo", "sequence_mean", "composed"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_policy.model_folder(tmp_path_factory.mktemp("objective") / "model")
    return tiny_policy.exact_model(folder)


@pytest.fixture(scope="module")
def groups(model):
    return tiny_policy.groups(model)


def in_parts(model, rows, objective, *, old=False, **split):
    """Value and gradient, summed over micro-batches and ranks by hand, and the micro-batches."""
    entropy_gradient = objective.entropy_bonus != 0
    module = PolicyModule(model, chunk=7, entropy_gradient=entropy_gradient, kl_from_uniform=True)
    model.zero_grad()
    total = 0.0
    shares = plan(rows, step=0, metrics={}, **split)
    micros = [micro for share in shares for micro in share.micro_batches]
    batches = [
        tiny_policy.filled(Batch.of(micro, torch.device("cpu"), 0), old=old) for micro in micros
    ]

    def outputs(batch):
        given = (batch.token_ids, batch.mask, tiny_policy.TEMPERATURE)
        found = module(*given, entropies=True, candidates=batch.candidates)
        logprobs, entropies, kl, candidates = found
        return replace(batch, kl_from_uniform=kl), logprobs, entropies, candidates

    if hasattr(objective.token_loss, "statistics"):
        seen = [with_outputs(*outputs(batch)) for batch in batches]
        found = torch.stack([objective.token_loss.statistics(each) for each in seen]).sum(0)
        bound = partial(objective.token_loss, statistics=found.detach())
        objective = replace(objective, token_loss=bound)
    for batch in batches:
        known, logprobs, entropies, candidates = outputs(batch)
        value, metrics = objective(known, logprobs, entropies, 0.3, candidates)
        value.backward()
        total += float(value.detach())
        assert all(m.shape == logprobs.shape and not m.requires_grad for m in metrics.values())
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    return total, gradient, micros


@pytest.mark.parametrize(("loss", "weights", "how"), combinations())
def test_value_and_gradient_are_the_same_for_every_split_and_order(
    model, groups, loss, weights, how
):
    composed = how == "composed"
    objective = Objective(shipped(loss), **(COMPOSED if composed else {}))
    rows = weighted_rows(groups, AGGREGATIONS[weights])
    fixed_old = [tiny_policy.fixed(*tiny_policy.completion(row))[0] for row in rows]  # as `filled`
    extras = (everything, fixed_old) if composed else (None, None)
    plain = tiny_policy.informed(model, rows, shipped(loss), old=extras[1])
    value, gradient = tiny_policy.reference(model, rows, plain, extras[0], old=extras[1])
    assert tiny_policy.flat(gradient).norm() > 0.01
    counts = set()
    for seed, (ranks, budget) in enumerate(SPLITS):
        shuffled = random.Random(seed).sample(groups, len(groups))
        rows = weighted_rows(shuffled, AGGREGATIONS[weights])
        split = {"ranks": ranks, "tokens_per_micro_batch": budget}
        total, found, micros = in_parts(model, rows, objective, old=composed, **split)
        assert total == pytest.approx(value, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)
        counts.add(len(micros))
    assert len(counts) > 3


@dataclass(frozen=True)
class Ranked:
    """A loss that compares mean logprobs and KL divergences of all rollouts of a group."""

    whole_groups = True

    def __call__(self, tokens):
        ids, index = tokens.rollout_ids.unique(return_inverse=True)
        means = mean_per_sequence(tokens.logprobs, index, len(ids))
        numbers = tokens.advantages + 5 * tokens.kl_from_uniform
        worth = mean_per_sequence(numbers, index, len(ids))
        groups = torch.zeros_like(ids).scatter(0, index, tokens.group_ids)
        same = groups[:, None] == groups
        gaps = (means[:, None] - means) * (worth[:, None] - worth)
        losses = (torch.nn.functional.softplus(-gaps) * same).sum(1)
        return TokenLoss(losses[index], {})


def forked(group):
    """Return the group with its rollouts in two rows each, so that a group has six."""
    rollouts = []
    for rollout in group.rollouts:
        (row,) = rollout.rows
        rollouts.append(replace(rollout, rows=(row, replace(row))))
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_loss_that_compares_rollouts_is_the_same_for_every_split_into_whole_groups(
    model, shares_prefixes
):
    groups = [forked(group) for group in tiny_policy.groups(model, num_groups=5)]
    flat = Credit(0.0, (0.0,))
    groups[1] = replace(groups[1], credits=(flat, flat, flat))
    # One rollout of this group has no advantage, and goes with the others all the same.
    groups[2] = replace(groups[2], credits=(flat, *groups[2].credits[1:]))
    # A group has no member for a rollout that does not train.
    groups[3] = replace(groups[3], credits=(*groups[3].credits[:2], replace(flat, trains=False)))

    def parts(groups, ranks, budget):
        rows = weighted_rows(groups, aggregation.sequence_mean)
        how = {"ranks": ranks, "shares_prefixes": shares_prefixes, "whole_groups": True}
        return in_parts(model, rows, Objective(Ranked()), tokens_per_micro_batch=budget, **how)

    value, gradient, _ = parts(groups, 1, 10_000)
    counts = set()
    for seed, (ranks, budget) in enumerate(itertools.product((1, 2, 3), (120, 200, 400))):
        shuffled = random.Random(seed).sample(groups, len(groups))
        total, found, micros = parts(shuffled, ranks, budget)
        assert total == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-12)
        seen = [set(micro.group_ids.tolist()) - {-1} for micro in micros]
        members = list(itertools.chain(*seen))
        assert sorted(members) == sorted(set(members)) == list(range(5))
        assert len(seen) % ranks == 0
        counts.add(len(seen))
    assert len(counts) > 2
    expected = r"a group of 6 rows exceeds trainer.tokens_per_micro_batch=20: raise it or"
    with pytest.raises(RunFailed, match=expected):
        parts(groups, 1, 20)
