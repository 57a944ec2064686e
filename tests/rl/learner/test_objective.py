"""Value and gradient of the objective do not depend on how the batch is split, in float64.

The last tests are worked by hand: rows of two tokens and one, weights 0.5 and 0.25, advantages 2
and -4. Outside of the completion are NaN, which reach neither value nor gradient. Then come means
over all tokens, and how far vLLM is off.
"""

import itertools
import math
import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from losses import aggregation
from losses.correction import Correction, tis_sequence
from losses.forward_kl_topk import forward_kl_topk
from losses.kl import k1, k2, k3
from losses.ppo_clip import ppo_clip
from losses.tokens import MAX_LOG_RATIO, TokenLoss, mean_per_sequence
from rl.config.build import component
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, with_outputs
from rl.learner.observation import observation
from rl.learner.preparation import relative_penalties
from rl.learner.token_sums import TokenSums
from rl.records import Credit, MicroBatch
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


NAN = np.nan
ROWS = MicroBatch(
    token_ids=np.array([[1, 2, 3], [4, 5, 0]], np.int32),
    completion_mask=np.array([[False, True, True], [False, True, False]]),
    rollout_logprobs=np.array([[NAN, -1, -2], [NAN, -3, NAN]], np.float32),
    advantages=np.array([[NAN, 2, 2], [NAN, -4, NAN]], np.float32),
    token_weights=np.array([[0, 0.5, 0.5], [0, 0.25, 0]], np.float32),
    token_versions=np.array([[-1, 6, 7], [-1, 7, -1]], np.int32),
    turns=np.array([[-1, 0, 1], [-1, 3, -1]], np.int32),
    source=np.array([[1, 1, 1], [0, 0, 0]], np.int8),
    rollout_ids=np.array([4, 2], np.int32),
    group_ids=np.array([1, 0], np.int32),
    first_positions=np.array([0, 5], np.int32),
    row_numbers=np.array([0, 1], np.int32),
)
OLD = torch.tensor([-1.5, -1.0, -2.5])
REF = torch.tensor([-1.0, -2.0, -4.0])  # k1 is 0, 1, 2


def batch(**anchors):
    return replace(Batch.of(ROWS, torch.device("cpu"), 8), **anchors)


def own():
    return torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)


def reinforce(tokens):
    """2, 2 and -8."""
    return TokenLoss(-tokens.advantages * tokens.logprobs, {"ones": torch.ones(3)})


def penalty(estimator, place="loss", beta=7.0, target_kl=None):
    return KLPenalty(estimator=estimator, beta=beta, place=place, target_kl=target_kl)


def uneven(tokens):
    assert tokens.old_logprobs.tolist() == OLD.tolist()
    return Correction(torch.tensor([1.0, 3.0, 0.5]), {"dropped": torch.tensor([0.0, 0.0, 1.0])})


def test_the_weighted_sum_of_losses_and_what_a_loss_sees():
    def noted(tokens):
        assert tokens.num_sequences == 2
        assert tokens.sequence_ids.tolist() == [0, 0, 1]
        assert tokens.rollout_ids.tolist() == [4, 4, 2]
        assert tokens.group_ids.tolist() == [1, 1, 0]
        assert tokens.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
        assert tokens.staleness.tolist() == [2, 1, 1]
        assert tokens.positions.tolist() == [0, 1, 5]
        assert tokens.turns.tolist() == [0, 1, 3]
        assert tokens.entropies.tolist() == [0.5, 0.25, 1.0]
        assert not tokens.entropies.requires_grad
        return reinforce(tokens)

    logprobs, entropies = own(), torch.tensor([0.5, 0.25, 1.0], requires_grad=True)
    value, metrics = Objective(noted)(batch(), logprobs, entropies)
    value.backward()
    # 0.5 * 2 * 1 + 0.5 * 2 * 1 + 0.25 * -4 * 2
    assert value.item() == 0.0
    assert logprobs.grad.tolist() == [-1.0, -1.0, 1.0]
    assert metrics["ones"].tolist() == [1, 1, 1]
    assert "ratio_clamped" not in metrics  # this loss has no ratio
    # k3 of log(pi / mu) = 0, 1, 1: e - 1 - 1
    expected = torch.tensor([0.0, np.e - 2, np.e - 2], dtype=torch.float32)
    torch.testing.assert_close(metrics["kl_to_rollout"], expected)


def test_a_correction_multiplies_the_loss_and_neither_the_divergence_nor_the_entropy():
    logprobs, entropies = own(), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    objective = Objective(reinforce, uneven, penalty(k2), entropy_bonus=0.01)
    value, metrics = objective(
        batch(old_logprobs=OLD, ref_logprobs=REF), logprobs, entropies, beta=0.1
    )
    value.backward()
    # Losses 1 * 2, 3 * 2, 0.5 * -8; divergences 0, 0.5, 2; entropies 1, 2, 3.
    expected = 0.5 * (2 - 0.01) + 0.5 * (6 + 0.05 - 0.02) + 0.25 * (-4 + 0.2 - 0.03)
    torch.testing.assert_close(value.detach(), torch.tensor(expected))
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, -2.95, 0.55]))
    torch.testing.assert_close(entropies.grad, torch.tensor([-0.005, -0.005, -0.0025]))
    assert metrics["correction"].tolist() == [1.0, 3.0, 0.5]
    assert metrics["dropped"].tolist() == [0.0, 0.0, 1.0]
    assert metrics["kl_divergence"].tolist() == [0.0, 0.5, 2.0]
    assert metrics["entropy"].tolist() == [1.0, 2.0, 3.0]
    assert not any(metric.requires_grad for metric in metrics.values())
    # Without old and reference logprobs there is neither correction nor divergence.
    value, metrics = objective(batch(), logprobs, torch.zeros(3), beta=0.1)
    assert value.item() == 0.5 * 2 + 0.5 * 2 + 0.25 * -8
    assert metrics.keys().isdisjoint({"correction", "kl_divergence"})


E1, E2 = math.exp(-1), math.exp(-2)


@pytest.mark.parametrize(
    ("kl", "divergence", "gradient"),
    [
        (penalty(k1), [0.0, 1.0, 2.0], [1.0, 1.0, 1.0]),
        (penalty(k3), [0.0, E1, E2 + 1], [0.0, 1 - E1, 1 - E2]),
        (penalty(k1, "reward"), [0.0, 1.0, 2.0], None),
        (penalty(k3, beta=0.0), [0.0, E1, E2 + 1], None),
    ],
    ids=["k1", "k3", "in the reward", "without weight"],
)
def test_a_divergence_is_measured_and_joins_the_loss_with_the_present_beta(
    kl, divergence, gradient
):
    logprobs, weights = own(), torch.tensor([0.5, 0.5, 0.25])
    value, metrics = Objective(lambda t: TokenLoss(0.0 * t.logprobs, {}), kl=kl)(
        batch(ref_logprobs=REF), logprobs, torch.zeros(3), beta=0.1
    )
    value.backward()
    torch.testing.assert_close(metrics["kl_divergence"], torch.tensor(divergence))
    if gradient is None:  # it acts elsewhere and adds nothing
        assert value.item() == 0
        assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    else:
        expected = (0.1 * weights * torch.tensor(divergence)).sum()
        torch.testing.assert_close(value.detach(), expected)
        torch.testing.assert_close(logprobs.grad, 0.1 * weights * torch.tensor(gradient))


@pytest.mark.parametrize(
    ("mistaken", "message"),
    [
        (
            lambda t: TokenLoss((-t.logprobs).mean(), {}),
            r"shape \[\]: give a tensor \[N\], neither",
        ),
        (lambda t: TokenLoss(t.logprobs[1:], {}), r"shape \[2\] for 3 tokens: return TokenLoss"),
        (lambda t: None, "a NoneType for 3 tokens: return TokenLoss"),
    ],
)
def test_a_result_that_becomes_wrong_in_a_run_is_refused(mistaken, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Objective(mistaken)(batch(), own(), torch.zeros(3))


@pytest.mark.parametrize(
    ("target_kl", "kl", "factor"),
    [
        (0.04, 0.042, 1.005),  # 5 % above the target
        (0.04, 0.038, 0.995),
        (0.04, math.inf, 1.02),
        (0.04, -1.0, 0.98),  # k1 may be negative
        (None, 100.0, 1.0),
        (0.04, math.nan, 1.0),  # a skipped step
    ],
)
def test_beta_follows_the_divergence_by_at_most_two_percent_a_step(target_kl, kl, factor):
    adaptive = penalty(k1, target_kl=target_kl)
    assert adaptive.next_beta(0.5, kl) == pytest.approx(0.5 * factor, rel=1e-12)


# Two rollouts; all right, one masked and one without a score; one alone.
LOST = np.array([0.5, 0.0, 0.005, -0.003, 0.0, 100.0, 3.0])
COUNTS = np.array([True, True, True, True, False, False, True])
GROUP_IDS = np.array([0, 0, 1, 1, 1, 1, 2], np.int32)


@pytest.mark.parametrize(
    ("group_ids", "expected"),
    [
        (GROUP_IDS, [0.25, -0.25, 0.004, -0.004, 0.0, 0.0, 0.0]),
        (None, [0.5, 0.0, 0.005, -0.003, 0.0, 0.0, 3.0]),
    ],
    ids=["compared", "without a baseline"],
)
def test_an_advantage_loses_its_penalty_minus_the_mean_of_the_scored_rollouts(group_ids, expected):
    assert relative_penalties(LOST, COUNTS, group_ids) == pytest.approx(expected, abs=1e-12)


def observed(batch, objective, logprobs, entropies, beta=0.0, *candidates):
    """What the policy shows an observer of one micro-batch, given the module's outputs."""
    outputs = [each.clone().requires_grad_() for each in (logprobs, entropies, *candidates)]
    loss, metrics = objective.per_token(batch, *outputs[:2], beta, *outputs[2:])
    grads = torch.autograd.grad(batch.weighted_sum(loss), outputs, materialize_grads=True)
    return observation(batch, outputs[0], loss, grads, metrics)


def test_what_the_record_says_of_three_tokens():
    """Ratios 1.1, 1.5 and 1.5, clipped at 1.2 where they are to rise; the third is not kept.

    The gradient of the loss is -weight * advantage * ratio. That of the penalty is 0.1 * weight.
    """

    def loss(tokens):
        clipped = ppo_clip(tokens, clip_low=0.2, clip_high=0.2, dual_clip=None)
        metrics = {"mean": tokens.logprobs.detach().mean(), "odd": tokens.positions % 2 == 1}
        return TokenLoss(clipped.loss, metrics)

    def stop_the_third(*_):
        return Correction(torch.tensor([1.0, 2.0, 0.0]).double(), {})

    mu = torch.tensor([-1.0, -2.0, -3.0]).double()
    logs = torch.tensor([1.1, 1.5, 1.5]).double().log()
    ones = torch.ones(3).double()
    objective = Objective(loss, None, penalty(k1), entropy_bonus=0.01)
    found = observed(batch(ref_logprobs=mu), objective, mu + logs, ones, 0.1)
    torch.testing.assert_close(found["grad"], torch.tensor([-1.05, 0.05, 1.525]).double())
    terms = -torch.tensor([2.0, 2.0, -4.0]).double() * torch.tensor([1.1, 1.2, 1.5]).double()
    torch.testing.assert_close(found["loss"], terms + 0.1 * logs - 0.01)
    torch.testing.assert_close(found["pi"], mu + logs)
    assert found["ref"].tolist() == mu.tolist()
    assert found["kept"].tolist() == [True, True, True]
    # A number for a whole micro-batch is not one of a token.
    assert "metric_mean" not in found
    assert found["metric_odd"].tolist() == [False, True, True]  # at positions 0, 1 and 5
    assert found.keys().isdisjoint({"old", "correction", "candidate_grad"})

    found = observed(batch(old_logprobs=mu), Objective(loss, stop_the_third), mu + logs, ones)
    torch.testing.assert_close(found["grad"], torch.tensor([-1.1, 0.0, 0.0]).double())
    assert found["kept"].tolist() == [True, True, False]
    assert found["correction"].tolist() == [1.0, 2.0, 0.0]
    assert found["old"].tolist() == mu.tolist()


def test_where_distributions_are_compared_the_candidates_have_the_gradient():
    pi = torch.full((3, 2), 0.25).double().log()
    compared, ones = tiny_policy.filled(batch(), old=False), torch.ones(3).double()
    found = observed(compared, Objective(forward_kl_topk), ones, ones, 0.0, pi)
    assert found["grad"].tolist() == [0.0, 0.0, 0.0]
    assert (found["candidate_grad"] > 0).all()


# log(pi / mu) of four fresh tokens and a stale one in the middle.
PI = torch.tensor([2.0, 0.5, 999.0, 1.0, 4.0]).log() - 3
MU = torch.full((5,), -3.0)
FRESH = torch.tensor([True, True, False, True, True])
BY_HAND = {
    "mean_abs": (math.log(2) + math.log(2) + 0 + math.log(4)) / 4,
    "max_abs": math.log(4),
    # w - 1 - log w of each
    "kl": ((1 - math.log(2)) + (-0.5 + math.log(2)) + 0 + (3 - math.log(4))) / 4,
    "chi_square": (4 + 0.25 + 1 + 16) / 4 - 1,
    "effective_sample_size": 7.5**2 / (4 * 21.25),
}


def means(*parts):
    sums = TokenSums()
    for part in parts:
        metrics = {"entropy": PI[part], "of_micro_batch": PI[part].mean()}
        sums.add(torch.tensor(0.5), PI[part], MU[part], FRESH[part], metrics)
    return sums.means()


@pytest.mark.usefixtures("one_rank")  # test_updates.py has two
@pytest.mark.parametrize(
    "parts",
    [
        [slice(0, 5)],
        [slice(0, 2), slice(2, 5)],
        [slice(4, 5), slice(0, 0), slice(2, 3), slice(3, 4), slice(0, 2)],
    ],
)
def test_however_the_batch_is_split_the_mismatch_is_that_of_its_fresh_tokens(parts):
    found = means(*parts)
    for name, expected in BY_HAND.items():
        assert found[f"mismatch/sampled_{name}"] == pytest.approx(expected, rel=1e-6)
    assert found["train/loss"] == 0.5 * len(parts)
    # A number for a whole micro-batch weighs as its tokens, and that of none nothing.
    for name in ("entropy", "of_micro_batch"):
        assert found[f"train/{name}"] == pytest.approx(float(PI.mean()), rel=1e-6)
    # Of stale tokens alone nothing is said.
    assert not [name for name in means(slice(2, 3)) if name.startswith("mismatch/")]


@pytest.mark.usefixtures("one_rank")
def test_one_broken_token_shows_in_the_maximum_and_makes_nothing_infinite():
    """Beyond e^20 the ratio is clamped, as it is for every loss."""
    sums = TokenSums()
    mu = torch.tensor([-800.0, -1.0])
    sums.add(torch.tensor(0.0), torch.tensor([0.0, -1.0]), mu, torch.ones(2, dtype=torch.bool), {})
    found = sums.means()
    assert found["mismatch/sampled_max_abs"] == 800
    clamped = math.exp(MAX_LOG_RATIO)
    assert found["mismatch/sampled_kl"] == pytest.approx((clamped - 1 - MAX_LOG_RATIO) / 2)
    assert found["mismatch/sampled_chi_square"] == pytest.approx((clamped**2 + 1) / 2 - 1)
    assert found["mismatch/sampled_effective_sample_size"] == pytest.approx(0.5, rel=1e-6)
