"""The objective by hand: rows of two tokens and one, weights 0.5 and 0.25, advantages 2 and -4."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.correction import Correction
from losses.kl import k1, k2, k3
from losses.tokens import TokenLoss
from rl.learner.kl import KLPenalty
from rl.learner.objective import Batch
from rl.records import MicroBatch
from tests.support.summed_objective import SummedObjective as Objective

ROWS = MicroBatch(
    token_ids=np.array([[1, 2, 3], [4, 5, 0]], np.int32),
    completion_mask=np.array([[False, True, True], [False, True, False]]),
    rollout_logprobs=np.array([[0, -1, -2], [0, -3, 0]], np.float32),
    advantages=np.array([[0, 2, 2], [0, -4, 0]], np.float32),
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


def nothing(tokens):
    return TokenLoss(0.0 * tokens.logprobs, {})


def pull(estimator, place="loss", beta=7.0):
    return KLPenalty(estimator=estimator, beta=beta, place=place, target_kl=None)


def uneven(old_logprobs, rollout_logprobs, sequence_ids, num_sequences):
    assert old_logprobs.tolist() == OLD.tolist()
    assert rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (sequence_ids.tolist(), num_sequences) == ([0, 0, 1], 2)
    return Correction(torch.tensor([1.0, 3.0, 0.5]), {"dropped": torch.tensor([0.0, 0.0, 1.0])})


def test_the_weighted_sum_of_losses_and_what_a_loss_sees():
    rows = batch()
    assert rows.staleness.tolist() == [2, 1, 1]
    assert rows.sequence_ids.tolist() == [0, 0, 1]
    assert rows.rollout_ids.tolist() == [4, 4, 2]
    assert rows.group_ids.tolist() == [1, 1, 0]
    logprobs, seen = own(), []

    def noted(tokens):
        seen.append(tokens)
        return reinforce(tokens)

    entropies = torch.tensor([0.5, 0.25, 1.0], requires_grad=True)
    value, metrics = Objective(noted)(rows, logprobs, entropies)
    value.backward()
    # 0.5 * 2 * 1 + 0.5 * 2 * 1 + 0.25 * -4 * 2
    assert value.item() == 0.0
    assert logprobs.grad.tolist() == [-1.0, -1.0, 1.0]
    assert seen[0].num_sequences == 2
    assert seen[0].rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert seen[0].staleness.tolist() == [2, 1, 1]
    assert seen[0].positions.tolist() == [0, 1, 5]
    assert seen[0].turns.tolist() == [0, 1, 3]
    assert seen[0].entropies.tolist() == [0.5, 0.25, 1.0]
    assert not seen[0].entropies.requires_grad
    assert metrics["ones"].tolist() == [1, 1, 1]
    assert "ratio_clamped" not in metrics  # this loss has no ratio
    # k3 of log(pi / mu) = 0, 1, 1: e - 1 - 1
    expected = torch.tensor([0.0, np.e - 2, np.e - 2], dtype=torch.float32)
    torch.testing.assert_close(metrics["kl_to_rollout"], expected)


def test_a_correction_multiplies_the_loss_and_neither_the_divergence_nor_the_entropy():
    logprobs, entropies = own(), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    objective = Objective(reinforce, uneven, pull(k2), entropy_bonus=0.01)
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


def test_without_old_logprobs_the_ratio_corrects_and_nothing_else():
    value, metrics = Objective(reinforce, uneven)(batch(), own(), torch.zeros(3))
    assert value.item() == 0.5 * 2 + 0.5 * 2 + 0.25 * -8
    assert "correction" not in metrics


E1, E2 = math.exp(-1), math.exp(-2)


@pytest.mark.parametrize(
    ("estimator", "divergence", "gradient"),
    [
        (k1, [0.0, 1.0, 2.0], [1.0, 1.0, 1.0]),
        (k2, [0.0, 0.5, 2.0], [0.0, 1.0, 2.0]),
        (k3, [0.0, E1, E2 + 1], [0.0, 1 - E1, 1 - E2]),
    ],
    ids=["k1", "k2", "k3"],
)
def test_the_divergence_joins_the_loss_with_the_present_beta(estimator, divergence, gradient):
    logprobs, weights = own(), torch.tensor([0.5, 0.5, 0.25])
    value, metrics = Objective(nothing, kl=pull(estimator))(
        batch(ref_logprobs=REF), logprobs, torch.zeros(3), beta=0.1
    )
    value.backward()
    torch.testing.assert_close(value.detach(), (0.1 * weights * torch.tensor(divergence)).sum())
    torch.testing.assert_close(logprobs.grad, 0.1 * weights * torch.tensor(gradient))
    torch.testing.assert_close(metrics["kl_divergence"], torch.tensor(divergence))


@pytest.mark.parametrize(
    "kl", [pull(k1, "reward"), pull(k3, beta=0.0)], ids=["in the reward", "without weight"]
)
def test_a_divergence_that_acts_elsewhere_is_measured_and_adds_nothing(kl):
    logprobs = own()
    value, metrics = Objective(nothing, kl=kl)(
        batch(ref_logprobs=REF), logprobs, torch.zeros(3), beta=0.1
    )
    value.backward()
    assert value.item() == 0
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(metrics["kl_divergence"], kl.estimator(own(), REF).detach())


def test_without_reference_logprobs_there_is_no_divergence():
    value, metrics = Objective(nothing, kl=pull(k3))(batch(), own(), torch.zeros(3), beta=0.1)
    assert value.item() == 0
    assert "kl_divergence" not in metrics


@pytest.mark.parametrize(
    ("mistaken", "message"),
    [
        (lambda t: (-t.advantages * t.logprobs).mean(), r"shape \[\] for 3 tokens: .*per token"),
        (lambda t: t.logprobs[:, None] * t.advantages, r"shape \[3, 3\] for 3 tokens"),
    ],
)
def test_a_loss_whose_shape_depends_on_the_data_is_refused(mistaken, message):
    with pytest.raises(ValueError, match=message):
        Objective(lambda tokens: TokenLoss(mistaken(tokens), {}))(batch(), own(), torch.zeros(3))
