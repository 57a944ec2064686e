"""How beta follows the divergence, and advantages of rewards less the divergence, by hand."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from losses.advantages import group_mean, group_zscore
from losses.kl import k1
from rl.learner.kl import KLPenalty
from rl.learner.preparation import penalised_advantages


def penalty(target_kl: float | None, beta: float = 0.5) -> KLPenalty:
    return KLPenalty(estimator=k1, beta=beta, place="loss", target_kl=target_kl)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.04, 1.0),
        (0.042, 1.005),  # 5 % above the target
        (0.038, 0.995),
        (0.048, 1.02),  # 20 % above, where the clip begins
        (0.032, 0.98),
        (4.0, 1.02),
        (math.inf, 1.02),
        (0.0, 0.98),
        (-1.0, 0.98),  # k1 may be negative
    ],
)
def test_beta_follows_the_divergence_by_at_most_two_percent_a_step(kl, factor):
    assert penalty(0.04).next_beta(0.5, kl) == pytest.approx(0.5 * factor, rel=1e-12)


def test_without_a_target_beta_stays():
    assert penalty(None).next_beta(0.5, 100.0) == 0.5


def test_a_divergence_that_is_no_number_leaves_beta_alone():
    """Its step is skipped: nothing may change, and a beta of NaN would never come back."""
    assert penalty(0.04).next_beta(0.5, math.nan) == 0.5


@pytest.mark.parametrize(("beta", "acts"), [(0.0, False), (1e-6, True)])
def test_there_is_a_penalty_where_beta_is_above_zero(beta, acts):
    assert penalty(None, beta).acts == acts


NAN = math.nan


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # 0.5 and 0, 1 and 3 beside one that nobody could score, one alone
        (group_mean, [0.25, -0.25, -1.0, 0.0, 1.0, 0.0]),
        (
            partial(group_zscore, epsilon=0.0),
            [math.sqrt(0.5), -math.sqrt(0.5), -math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0],
        ),
    ],
    ids=["group_mean", "group_zscore"],
)
def test_what_is_left_of_the_rewards_is_compared_group_by_group(advantage, expected):
    rewards = np.array([1.0, 0.0, 2.0, NAN, 2.0, 7.0], np.float32)
    lost = np.array([0.5, 0.0, 1.0, 100.0, -1.0, 3.0])
    group_ids = np.array([0, 0, 1, 1, 1, 2], np.int32)
    found = penalised_advantages(rewards, group_ids, lost, advantage)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_penalty_that_evens_out_the_rewards_leaves_no_lesson():
    rewards, lost = np.array([1.0, 0.0], np.float32), np.array([0.75, -0.25])
    found = penalised_advantages(rewards, np.zeros(2, np.int32), lost, group_mean)
    assert found.tolist() == [0.0, 0.0]


def test_without_a_penalty_advantages_are_those_of_the_rewards():
    rewards, ids = np.array([1.0, 0.0, 0.5], np.float32), np.zeros(3, np.int32)
    found = penalised_advantages(rewards, ids, np.zeros(3), group_mean)
    assert found.tolist() == group_mean([1.0, 0.0, 0.5])
