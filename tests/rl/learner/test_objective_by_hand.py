"""The objective by hand: rows of two tokens and one, weights 0.5 and 0.25, advantages 2 and -4.

Outside of the completion are NaN, which reach neither value nor gradient.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.correction import Correction
from losses.forward_kl_topk import forward_kl_topk
from losses.kl import k1, k2, k3
from losses.ppo_clip import ppo_clip
from losses.tokens import TokenLoss
from rl.learner.kl import KLPenalty
from rl.learner.objective import Batch
from rl.learner.observation import observation
from rl.learner.preparation import relative_penalties
from rl.records import MicroBatch
from tests.support.tiny_policy import SummedObjective as Objective
from tests.support.tiny_policy import filled

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
    compared, ones = filled(batch(), old=False), torch.ones(3).double()
    found = observed(compared, Objective(forward_kl_topk), ones, ones, 0.0, pi)
    assert found["grad"].tolist() == [0.0, 0.0, 0.0]
    assert (found["candidate_grad"] > 0).all()
