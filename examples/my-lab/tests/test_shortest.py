"""Compare the advantage with a table worked by hand."""

import pytest

from losses.groups import ScoredGroup
from my_lab.shortest import shortest

R = 2**-0.5  # (1 - 1/2) / std: the z-score of reward 1 in a group of 1 and 0
TABLE = [  # keep, rewards, lengths, expected
    (2, [1.0, 0.0, 1.0, 0.0], [3, 5, 9, 8], [R, -R, 0.0, 0.0]),  # the two longest do not count
    (2, [0.0, 1.0, 1.0], [9, 4, 6], [0.0, 0.0, 0.0]),  # the two shortest have equal rewards
    (2, [1.0, None, 0.0], [3, 1, 5], [R, 0.0, -R]),  # the shortest has no reward, so it is not kept
    (2, [1.0, 0.0, 0.0], [4, 4, 4], [R, -R, 0.0]),
    (9, [1.0, 0.0], [4, 7], [R, -R]),  # all are kept
    (1, [1.0, 0.0], [4, 7], [0.0, 0.0]),
]


@pytest.mark.parametrize(("keep", "rewards", "lengths", "expected"), TABLE)
def test_only_the_shortest_are_compared(
    keep: int, rewards: list[float | None], lengths: list[int], expected: list[float]
) -> None:
    group = ScoredGroup.by_hand(rewards, lengths=lengths)
    assert shortest(group, keep=keep, epsilon=0.0) == pytest.approx(expected)
