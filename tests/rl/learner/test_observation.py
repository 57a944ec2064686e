"""What the record says of single tokens: grads by hand, and under any split, in float64."""

import dataclasses
import math

import pytest
import torch

from losses.aggregation import token_mean
from losses.correction import Correction, tis_sequence
from losses.kl import k1, k3
from losses.tokens import TokenLoss
from rl.config.build import build
from rl.learner.kl import KLPenalty
from rl.learner.objective import Batch
from rl.learner.observation import observation
from rl.rollouts.plan import plan, weighted_rows
from tests.rl.learner.test_objective_by_hand import ROWS
from tests.support.composing import chosen
from tests.support.forked_groups import forked_groups
from tests.support.summed_objective import SummedObjective as Objective
from tests.support.tiny_policy import filled

# Ratios 1.1, 1.5 and 1.5, clipped at 1.2 where they are to rise.
RATIOS = torch.tensor([1.1, 1.5, 1.5], dtype=torch.float64)
MU = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)


def observed(batch, objective, logprobs, entropies, beta=0.0, *candidates):
    """What the policy shows an observer of one micro-batch, given the module's outputs."""
    outputs = [each.clone().requires_grad_() for each in (logprobs, entropies, *candidates)]
    loss, metrics = objective.per_token(batch, *outputs[:2], beta, *outputs[2:])
    grads = torch.autograd.grad(batch.weighted_sum(loss), outputs, materialize_grads=True)
    return observation(batch, outputs[0], loss, grads, metrics)


def by_hand(objective, **anchors):
    batch = dataclasses.replace(Batch.of(ROWS, torch.device("cpu"), 7), **anchors)
    return observed(batch, objective, MU + RATIOS.log(), torch.ones(3).double(), 0.1)


def clip():
    return build(chosen("loss", "grpo"))


def test_the_gradients_of_three_tokens_by_hand():
    found = by_hand(Objective(clip()))
    # -weight * advantage * ratio; the second is clipped, the third is not, for it is to fall.
    torch.testing.assert_close(found["grad"], torch.tensor([-1.1, 0.0, 1.5]).double())
    torch.testing.assert_close(found["pi"], MU + RATIOS.log())
    assert found["kept"].tolist() == [True, True, True]
    assert found["metric_clip_fraction"].tolist() == [0.0, 1.0, 0.0]
    assert found.keys().isdisjoint({"old", "ref", "correction", "candidate_grad"})


def test_a_grad_is_that_of_the_whole_objective_penalty_and_bonus_included():
    kl = KLPenalty(estimator=k1, beta=0.1, place="loss", target_kl=None)
    found = by_hand(Objective(clip(), kl=kl, entropy_bonus=0.01), ref_logprobs=MU)
    torch.testing.assert_close(found["grad"], torch.tensor([-1.05, 0.05, 1.525]).double())
    terms = -torch.tensor([2.0, 2.0, -4.0]).double() * torch.tensor([1.1, 1.2, 1.5]).double()
    torch.testing.assert_close(found["loss"], terms + 0.1 * RATIOS.log() - 0.01)
    assert found["ref"].tolist() == MU.tolist()


def test_a_token_that_a_correction_stopped_was_not_kept():
    def stop_the_third(*_):
        return Correction(torch.tensor([1.0, 2.0, 0.0]).double(), {})

    found = by_hand(Objective(clip(), stop_the_third), old_logprobs=MU)
    torch.testing.assert_close(found["grad"], torch.tensor([-1.1, 0.0, 0.0]).double())
    assert found["kept"].tolist() == [True, True, False]
    assert found["correction"].tolist() == [1.0, 2.0, 0.0]
    assert found["old"].tolist() == MU.tolist()


def test_where_distributions_are_compared_the_candidates_have_the_gradient():
    batch = filled(Batch.of(ROWS, torch.device("cpu"), 7), old=False)
    pi = torch.full((3, 2), 0.25).double().log()
    objective = Objective(build(chosen("loss", "forward_kl_topk")))
    found = observed(batch, objective, MU, torch.ones(3).double(), 0.0, pi)
    assert found["grad"].tolist() == [0.0, 0.0, 0.0]
    assert (found["candidate_grad"] > 0).all()


def test_what_a_loss_measures_of_a_whole_micro_batch_is_left_out():
    def loss(tokens):
        metrics = {"mean": tokens.logprobs.detach().mean(), "odd": tokens.positions % 2 == 1}
        return TokenLoss(-tokens.advantages * tokens.logprobs, metrics)

    found = by_hand(Objective(loss))
    assert "metric_mean" not in found
    assert found["metric_odd"].tolist() == [False, True, True]  # at positions 0, 1 and 5


EVERYTHING = {
    "correction": lambda *args: tis_sequence(*args, cap=1.05),
    "kl": KLPenalty(estimator=k3, beta=9.0, place="loss", target_kl=None),
    "entropy_bonus": 0.2,
}


def numbers(batch):
    """Logprobs and entropies that depend on the token alone, so that every split has the same."""
    ids = batch.token_ids[batch.mask].double()
    return batch.rollout_logprobs.double() + 0.4 * torch.sin(ids), 1 + torch.cos(ids)


def all_grads(rows, objective, ranks, budget):
    """The grads of every row, by its rollout and number."""
    grads = {}
    for share in plan(rows, step=0, ranks=ranks, tokens_per_micro_batch=budget, metrics={}):
        for micro in share.micro_batches:
            batch = filled(Batch.of(micro, torch.device("cpu"), 0), old=True)
            found = observed(batch, objective, *numbers(batch), 0.3)["grad"]
            for i, key in enumerate(zip(micro.rollout_ids, micro.row_numbers, strict=True)):
                grads[tuple(map(int, key))] = found[batch.sequence_ids == i]
    return grads


@pytest.mark.parametrize("loss", ["grpo", "gspo", "cispo"])
def test_a_grad_is_autograd_s_of_the_whole_objective_under_any_split(loss):
    objective = Objective(build(chosen("loss", loss)), **EVERYTHING)
    rows = weighted_rows(forked_groups(), token_mean)
    # The whole: every row by itself, in one sum that is differentiated once.
    leaves, total = {}, torch.zeros((), dtype=torch.float64)
    for row in rows:
        (share,) = plan([row], step=0, ranks=1, tokens_per_micro_batch=1, metrics={})
        batch = filled(Batch.of(share.micro_batches[0], torch.device("cpu"), 0), old=True)
        logprobs, entropies = numbers(batch)
        leaf = leaves[row.rollout_id, row.number] = logprobs.requires_grad_()
        total = total + objective(batch, leaf, entropies, 0.3)[0]
    expected = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    assert sum(len(each) for each in expected.values()) > 50
    assert any(number > 0 for _, number in expected)  # forked
    for ranks, budget in ((1, 10_000), (1, 1), (2, 60), (3, 25)):
        found = all_grads(rows, objective, ranks, budget)
        for key, grad in expected.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-12, atol=1e-15)


def test_a_loss_that_is_not_finite_is_recorded_as_it_is():
    found = by_hand(Objective(lambda t: TokenLoss(math.nan * t.logprobs, {})))
    assert found["grad"].isnan().all()
