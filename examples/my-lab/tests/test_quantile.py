"""Compare the advantages of quantile with a table worked by hand."""

import pytest

from losses.groups import ScoredGroup
from my_lab.quantile import quantile

TABLE = [  # quantile, rewards, advantages; a comment names the baseline
    (0.5, [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),  # hard example: 2nd of 0 0 0 1
    (0.5, [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, -1.0]),  # easy example: 2nd of 0 1 1 1
    (0.75, [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, -1.0, -1.0]),  # 3rd of 0 0 1 1
    (0.25, [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]),  # 1st of 0 0 1 1
    (0.5, [0.25, None, 1.0, 0.5], [-0.25, 0.0, 0.5, 0.0]),  # 2nd of 1/4 1/2 1, without None
    (0.0, [0.5, 1.0], [0.0, 0.5]),  # smallest reward
    (1.0, [0.5, 1.0], [-0.5, 0.0]),  # largest reward
    (0.5, [1.0, 1.0], [0.0, 0.0]),  # equal rewards
    (0.5, [None, None], [0.0, 0.0]),
    (0.5, [], []),
]


@pytest.mark.parametrize(("share", "rewards", "expected"), TABLE)
def test_advantages_match_the_table(
    share: float, rewards: list[float | None], expected: list[float]
) -> None:
    assert quantile(ScoredGroup.by_hand(rewards), quantile=share) == expected
