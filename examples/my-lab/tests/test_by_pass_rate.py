"""Compare the penalties with a table worked by hand."""

import pytest

from losses.groups import ScoredGroup
from my_lab.by_pass_rate import ByPassRate

TABLE = [  # rewards, lengths, penalties
    ([1.0, 1.0], [10, 20], [5.0, 10.0]),  # all are right, so the penalty is half of the length
    ([1.0, 0.0, 0.0, 0.5], [8, 8, 16, 0], [1.0, 1.0, 2.0, 0.0]),  # a quarter is right
    ([0.0, 0.0], [8, 16], [2.0, 4.0]),  # none is right, which counts as one
    ([1.0, None], [8, 16], [4.0, 8.0]),  # only scored rollouts count
    ([None], [8], [4.0]),
]


@pytest.mark.parametrize(("rewards", "lengths", "expected"), TABLE)
def test_the_penalty_grows_with_the_share_of_right_rollouts(
    rewards: list[float | None], lengths: list[int], expected: list[float]
) -> None:
    shaping = ByPassRate(normalise_each=False, length_penalty=0.5, right=1.0)
    assert shaping.penalties(ScoredGroup.by_hand(rewards, lengths=lengths)) == expected
