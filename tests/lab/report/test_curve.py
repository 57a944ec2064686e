"""A curve and its numbers, computed by hand."""

import numpy as np
import pytest

from lab.report.curve import Curve


def curve(steps, scores) -> Curve:
    steps = np.array(steps, float)
    return Curve(steps, steps * 3, steps * 100, np.array(scores, float))


def test_the_first_point_at_a_score_and_the_mean_height():
    ours = curve([0, 10, 20, 40], [0.0, 0.4, 0.4, 0.8])
    assert ours.first_reach(ours.steps, 0.4) == 10
    assert ours.first_reach(ours.seconds, 0.41) == 120
    assert ours.first_reach(ours.tokens, 0.9) == float("inf")
    assert ours.mean_height == pytest.approx((2 + 4 + 12) / 40)


@pytest.mark.parametrize("steps", [[], [7], [7, 7]])
def test_fewer_than_two_points_have_no_height(steps):
    assert np.isnan(curve(steps, np.ones(len(steps))).mean_height)


def test_a_smoothed_one_is_the_mean_of_the_last_steps():
    ours = curve(range(20), range(20)).smoothed(4)
    assert ours.scores[[0, 1, 2, 3, 19]] == pytest.approx([0, 0.5, 1, 1.5, 17.5])
    assert ours.steps[19] == 19
    assert len(curve([], []).smoothed(4).scores) == 0


def test_points_are_chosen_by_number_or_by_condition():
    ours = curve([0, 10, 20], [1, 2, 3])
    assert ours.at([0, 2]).tokens == pytest.approx([0, 2000])
    assert ours.at(ours.steps <= 10).scores == pytest.approx([1, 2])
