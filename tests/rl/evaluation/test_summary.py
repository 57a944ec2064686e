"""Each estimate worked by hand, and then against what it estimates."""

import math
from itertools import combinations
from statistics import stdev

import pytest

from rl.evaluation.summary import pass_at_k, powers_of_two, standard_error, zero_spread


def test_the_clustered_error_by_hand():
    # mean 1/2; sums of deviations 1, -1, 0; sqrt(3/2 * (1 + 1 + 0)) / 6
    groups = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert standard_error(groups) == pytest.approx(math.sqrt(3) / 6)


def test_with_groups_of_one_size_it_is_the_error_of_the_group_means():
    groups = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    means = [sum(group) / 3 for group in groups]
    assert standard_error(groups) == pytest.approx(stdev(means) / math.sqrt(4))


def test_one_example_has_no_error():
    assert math.isnan(standard_error([[1.0, 0.0], []]))


@pytest.mark.parametrize(
    ("passed", "n", "k"),
    [(1, 4, 1), (1, 4, 2), (2, 4, 2), (3, 4, 2), (0, 4, 4), (1, 4, 4), (2, 5, 3), (2, 5, 5)],
)
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_pass(passed, n, k):
    group = [1.0] * passed + [0.0] * (n - passed)
    draws = list(combinations(group, k))
    share = sum(max(draw) for draw in draws) / len(draws)
    assert pass_at_k([group], k, threshold=1.0) == pytest.approx(share)


def test_pass_at_k_averages_examples_and_leaves_out_those_with_too_few_rollouts():
    groups = [[1.0, 0.0], [0.0, 0.0], [1.0]]
    assert pass_at_k(groups, 1, threshold=1.0) == pytest.approx((1 / 2 + 0 + 1) / 3)
    assert pass_at_k(groups, 2, threshold=1.0) == pytest.approx(1 / 2)
    assert math.isnan(pass_at_k(groups, 3, threshold=1.0))


@pytest.mark.parametrize(("limit", "powers"), [(1, [1]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_k_goes_up_in_powers_of_two_to_the_number_of_rollouts(limit, powers):
    assert powers_of_two(limit) == powers


def test_spread_needs_two_rollouts():
    assert zero_spread([[1.0, 1.0], [1.0, 0.0], [0.5, 0.5], [1.0]]) == pytest.approx(2 / 3)
    assert math.isnan(zero_spread([[1.0], [0.0]]))
    assert zero_spread([[0.3, 0.1 + 0.2], [1.0, 1.001]]) == 0.5  # rounding errors are no spread
