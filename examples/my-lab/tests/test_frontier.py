"""Test which examples the order prefers, and that a resumed run plays the same examples."""

import json
from collections import Counter

import pytest

from envs.episode import Example, StopReason
from envs.protocol import Pool
from my_lab.frontier import FrontierOrder
from rl.records import Group, Rollout


def begun(num_candidates: int = 4, sizes: tuple[int, ...] = (12,)) -> FrontierOrder:
    order = FrontierOrder(num_candidates=num_candidates)
    pools = [Pool(1.0, [Example(i, f"e{n}", []) for i in range(s)]) for n, s in enumerate(sizes)]
    order.begin(pools, 0)
    return order


def group(*rewards: float | None) -> Group:
    """Return a finished group with these rewards."""
    rollouts = tuple(Rollout((), [], r, {}, StopReason.STOP, 1, 0.0) for r in rewards)
    return Group(0, Example(0, "e0", []), 0, rollouts, ())


REWARDS = [(1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 1.0, 0.0)]


def taught(num_candidates: int = 4) -> FrontierOrder:
    """Return an order that observed REWARDS[position % 4] for each of its 12 examples."""
    order = begun(num_candidates)
    for position in range(12):
        order.observe((0, position), group(*REWARDS[position % 4]))
    return order


def drawn(order: FrontierOrder, first: int, last: int) -> list[tuple[int, int]]:
    return [order.next(index) for index in range(first, last)]


def test_what_teaches_most_is_played_most() -> None:
    counts = Counter(position % 4 for _, position in drawn(taught(), 0, 4000))
    # A draw of 4 of 12 examples lacks REWARDS[3] with probability C(9, 4) / C(12, 4) = 126 / 495,
    # and lacks both REWARDS[2] and REWARDS[3] with probability C(6, 4) / C(12, 4) = 15 / 495.
    assert counts[3] == pytest.approx(4000 * 369 / 495, abs=85)
    assert counts[2] == pytest.approx(4000 * 111 / 495, abs=80)
    assert counts[0] + counts[1] == pytest.approx(4000 * 15 / 495, abs=35)


def test_everything_is_tried_before_anything_is_chosen() -> None:
    order = begun(num_candidates=12)
    for index in range(12):
        order.observe(order.next(index), group(1.0, 0.0))
    assert len(order.state()["variances"]) == 12


def test_one_candidate_is_a_draw_at_random() -> None:
    counts = Counter(drawn(taught(num_candidates=1), 0, 6000))
    assert list(counts.values()) == pytest.approx([500] * 12, abs=70)


def test_a_group_that_cannot_be_scored_says_nothing() -> None:
    order = begun()
    order.observe((0, 0), group(None, None))
    assert order.state() == {"variances": []}
    assert order.metrics() == {"mean_variance": 0.0}
    order.observe((0, 0), group(1.0, 0.0, None))
    assert order.metrics() == {"mean_variance": 0.25}


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_resumed_run_plays_what_the_whole_one_would(cut: int) -> None:
    def go_on(order: FrontierOrder, first: int, last: int) -> list[tuple[int, int]]:
        played = []
        for index in range(first, last):
            played.append(order.next(index))
            order.observe(played[-1], group(float(index % 3 == 0), float(index % 5 == 0)))
        return played

    whole, before, after = (begun(sizes=(7, 5)) for _ in range(3))
    expected = go_on(whole, 0, 60)
    assert go_on(before, 0, cut) == expected[:cut]
    after.load(json.loads(json.dumps(before.state())))
    assert go_on(after, cut, 60) == expected[cut:]


def test_fewer_examples_than_candidates_are_enough() -> None:
    assert drawn(begun(sizes=(1,)), 0, 3) == [(0, 0)] * 3


def test_no_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match="num_candidates=0: set it to at least 1, such as 4"):
        FrontierOrder(num_candidates=0)
