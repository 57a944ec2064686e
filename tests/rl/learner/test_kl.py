"""How beta follows the divergence, and advantages of rewards minus the divergence, by hand."""

import math

import numpy as np
import pytest

from losses.kl import k1
from rl.learner.kl import KLPenalty
from rl.learner.preparation import relative_penalties


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


@pytest.mark.parametrize(("target_kl", "kl"), [(None, 100.0), (0.04, math.nan)])
def test_beta_stays_without_a_target_and_after_a_skipped_step(target_kl, kl):
    assert penalty(target_kl).next_beta(0.5, kl) == 0.5


@pytest.mark.parametrize(("beta", "active"), [(0.0, False), (1e-6, True)])
def test_there_is_a_penalty_if_beta_is_above_zero(beta, active):
    assert penalty(None, beta).is_active == active


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
