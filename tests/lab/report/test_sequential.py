"""Decisions that are sought after every seed."""

import numpy as np
import pytest

from lab.report.sequential import State, decide_arms, decision_of, radius, radius_of
from lab.report.statistics import OPEN, Interval, Scores, Spread


def scores_of(y):
    return [Scores(one, np.zeros(y.shape[2], np.int64)) for one in y]


def test_the_radius_is_the_linear_boundary_with_known_variance_and_wider_with_few_seeds():
    by_hand = 0.05 + 0.001 * np.log(2 / 0.05) / 0.1
    assert radius(0.001, np.inf, 1000, 0.1, 0.05) == pytest.approx(by_hand)
    assert radius(0.001, 4.0, 1000, 0.1, 0.05) > 1.3 * by_hand
    assert radius(0.0, 4.0, 3, 0.1, 0.05) < 1e-9  # equal seeds are no reason to stay open
    # Far below delta, the level is raised, because few seeds cannot estimate the smallest tails.
    assert radius(1e-6, 4.0, 3, 0.1, 0.05) < 0.05
    spread = Spread(((1e-5, 3), (1e-5, 20)), 3e-6, 2e-6, 9)  # the arm with fewer seeds counts
    of_three = radius(2.1e-5, spread.decision_degrees_of_freedom, 3, 0.1, 0.05)
    assert radius_of(spread, 0.1, 0.05) == pytest.approx(of_three)


def test_an_interval_that_ends_at_the_smallest_effect_is_equal_and_one_that_ends_at_0_is_open():
    ends = {(-0.1, 0.1): "equal", (0.0, 0.2): OPEN, (-0.2, 0.0): OPEN, (-0.11, -0.01): "worse"}
    assert [decision_of(*one, 0.1) for one in ends] == list(ends.values())


def test_the_seeds_of_an_open_arm_depend_on_the_size_of_its_difference_and_not_on_the_sign():
    spread = Spread(((0.04, 3), (0.04, 3)), 0.0, 0.0, 0)
    gains = (0.3, -0.3, 0.05, 0.0)
    states = (State(Interval(gain, np.nan, np.nan), 0.1, 0.05, OPEN, spread) for gain in gains)
    plus, minus, small, zero = (state.seeds_needed or 0 for state in states)
    # Below the smallest effect, the true difference may be 0.
    assert 0 < plus == minus < small == zero


def test_with_known_variance_few_paths_ever_leave_the_boundary():
    rng, counts = np.random.default_rng(0), np.arange(1, 301)
    common = rng.normal(0, 0.02, (4000, 1))  # noise of the questions, which seeds do not reduce
    paths = common + rng.normal(0, 0.3, (4000, 300)).cumsum(1) / counts
    radii = radius(0.02**2 + 0.3**2 / counts, np.inf, 10**6, 0.1, 0.05)
    left = (np.abs(paths) > radii).any(1).mean()
    assert 0.02 < left < 0.05


def test_arms_are_better_worse_equal_or_open_and_a_decision_stays():
    rng = np.random.default_rng(1)
    y = rng.normal(0, 0.004, (5, 8, 20))
    y[1] += 0.05
    y[2] -= 0.05
    y[4] += rng.normal(0, 0.2, (8, 1))
    states = decide_arms(scores_of(y), 0, 0.03)
    assert [one.decision for one in states[1:]] == ["better", "worse", "equal", "open"]
    assert (states[4].seeds_needed or 0) > 8
    later = y.copy()
    later[1, 7] -= 10.0  # one more seed that would change the difference
    assert decide_arms(scores_of(later), 0, 0.03)[1] == states[1]
    wide = decide_arms(scores_of(y), 0, 0.2)[1]
    assert wide.decision == "equal"  # because equal wins over better


def test_the_last_arm_has_the_whole_error_once_the_others_are_decided():
    rng = np.random.default_rng(2)
    y = rng.normal(0, 0.01, (3, 6, 20))
    y[1] += 0.1
    y[2] += rng.normal(0.02, 0.08, (6, 1))
    state = decide_arms(scores_of(y), 0, 0.03)[2]
    assert (state.decision, state.error) == (OPEN, 0.05)
    half = radius_of(state.spread, 0.03, 0.05)
    assert state.difference.high - state.difference.value == pytest.approx(half)


def test_arms_without_enough_seeds_keep_their_share_of_the_error():
    y = np.random.default_rng(0).normal(0, 0.01, (2, 6, 20))
    short = Scores(y[1, :2], np.zeros(20, np.int64))
    alone = decide_arms(scores_of(y), 0, 0.001)[1]
    assert decide_arms([*scores_of(y), short], 0, 0.001)[1].error == alone.error / 2
    assert decide_arms(scores_of(y), 0, 0.001, num_unscored=3)[1].error == alone.error / 4
