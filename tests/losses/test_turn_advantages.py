"""Credit by turn against numbers worked by hand."""

import itertools

import pytest

from losses.advantages import group_mean, turn_group_mean
from losses.aggregation import turn_mean


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [
        # Returns to go: 3, 2 and 1, 1; baselines: 2 and 1.5.
        ([[1, 2], [0, 1]], 1.0, [[1, 0.5], [-1, -0.5]]),
        # 1 + 2 / 2, 2 and 0 + 1 / 2, 1; baselines: 1.25 and 1.5.
        ([[1, 2], [0, 1]], 0.5, [[0.75, 0.5], [-0.75, -0.5]]),
        # Each turn by itself; baselines: 0.5 and 1.5.
        ([[1, 2], [0, 1]], 0.0, [[0.5, 0.5], [-0.5, -0.5]]),
        # The third turn has nothing to be compared with; the second one with one other.
        # Returns: 2 / 4, 3, 1 / 1, 1; baselines: 7/3 and 2.
        ([[2], [1, 2, 1], [0, 1]], 1.0, [[-1 / 3], [5 / 3, 1, 0], [-4 / 3, -1]]),
        # Equal from the second turn on: there is no lesson, in the first one there is.
        ([[1, 5], [0, 5]], 1.0, [[0.5, 0], [-0.5, 0]]),
        # Nobody knows what the second earned: the first has no one to be compared with.
        ([[1, 2], None], 1.0, [[0, 0], []]),
        ([[1], None, [0]], 1.0, [[0.5], [], [-0.5]]),
        ([[4, 2]], 1.0, [[0, 0]]),
        ([], 1.0, []),
    ],
)
def test_a_turn_is_compared_with_the_same_turn_of_the_others(rewards, discount, expected):
    found = turn_group_mean(rewards, discount=discount)
    assert [pytest.approx(numbers) for numbers in expected] == found


def test_what_is_earned_at_the_end_of_equally_many_turns_is_credited_to_all_alike():
    finals = [3.0, 1.0, 0.5]
    found = turn_group_mean([[0.0, 0.0, final] for final in finals], discount=1.0)
    assert found == [[a] * 3 for a in group_mean(finals)]


def test_the_order_of_a_group_does_not_matter():
    rewards = [[1.0, 2.0], [0.5], None, [3.0, 0.0, 1.0]]
    expected = turn_group_mean(rewards, discount=0.9)
    for order in itertools.permutations(range(4)):
        found = turn_group_mean([rewards[i] for i in order], discount=0.9)
        assert found == [pytest.approx(expected[i]) for i in order]


def test_every_turn_with_tokens_weighs_the_same():
    assert turn_mean([[2, 0, 4], [1]], [0, 0]) == [[1 / 6, 0, 1 / 12], [1 / 3]]
    assert turn_mean([[0], []], [0, 1]) == [[0.0], []]
