"""Pools of easy, normal and hard examples: who is in which, and how often each is drawn."""

import json
from collections import Counter
from random import Random

import pytest

from envs.episode import Example, StopReason
from rl.records import Group, Rollout
from rl.rollouts.difficulty_order import DifficultyOrder
from tests.rl.rollouts.test_example_order import KNOBS, places, pools

LEVELS = ("easy", "normal", "hard")


def make(given, seed=0, **knobs) -> DifficultyOrder:
    order = DifficultyOrder(**{**KNOBS, **knobs})
    order.begin(given, seed)
    return order


def played(*rewards: float | None) -> Group:
    """A group of which only the rewards matter."""
    rollouts = tuple(Rollout((), [], r, {}, StopReason.STOP, 1, 0.0) for r in rewards)
    return Group(0, Example(0, "e0", []), 0, rollouts, ())


def level_of(order: DifficultyOrder, place: tuple[int, int]) -> str:
    """The pool that an example lies in, by what a checkpoint keeps."""
    levels = order.state()["played"][place[0]]
    return next((level for level in LEVELS if place[1] in levels[level]), "unplayed")


@pytest.mark.parametrize(
    ("rewards", "level"),
    [
        ((1.0, 1.0), "easy"),
        ((0.6, 1.0), "easy"),  # the threshold itself
        ((0.5, 1.0), "normal"),
        ((0.0, 1.0), "normal"),
        ((0.0, 0.5), "normal"),  # 0.25, above the lower one
        ((0.0, 0.4), "hard"),  # 0.2, the threshold itself
        ((0.0, 0.0), "hard"),
        ((1.0, None), "easy"),  # the mean is that of what was scored
        ((0.0,), "hard"),  # a group of one
        ((None, None), "normal"),  # nothing is known: it stays
    ],
)
def test_the_mean_of_its_group_says_which_pool_an_example_is_in(rewards, level):
    order = make(pools(5))
    place = order.next(0)
    order.observe(place, played(*rewards))

    assert level_of(order, place) == level


def test_the_last_group_decides_and_one_that_cannot_be_scored_changes_nothing():
    order = make(pools(3))
    place = order.next(0)
    for rewards, level in (
        ((0.0, 0.0), "hard"),
        ((1.0, 1.0), "easy"),
        ((None, None), "easy"),
        ((1.0, 1.0), "easy"),  # as when a group is played again
        ((0.0, 1.0), "normal"),
    ):
        order.observe(place, played(*rewards))
        assert level_of(order, place) == level


def sorted_into(order: DifficultyOrder, size: int, pool: int = 0) -> None:
    """A third of a pool's examples each: 0, 3, 6 ... are easy, 1, 4 ... normal, 2, 5 ... hard."""
    for position in range(size):
        order.observe((pool, position), played((1.0, 0.5, 0.0)[position % 3]))


def test_each_pool_is_drawn_as_often_as_its_weight_says():
    order = make(pools(30))
    places(order, 30)
    sorted_into(order, 30)
    drawn = Counter(position % 3 for _, position in places(order, 8000, 30))

    # Three standard deviations of a binomial: 3 sqrt(8000 * 0.1 * 0.9) = 80, of 0.8: 107.
    assert [drawn[n] for n in range(3)] == pytest.approx([800, 6400, 800], abs=107)


def test_a_pool_that_is_empty_leaves_its_share_to_the_others_in_their_proportion():
    order = make(pools(30), easy_weight=1.0, normal_weight=5.0, hard_weight=3.0)
    places(order, 30)
    for position in range(30):
        order.observe((0, position), played(float(position % 2)))  # easy or hard, none is normal
    drawn = Counter(position % 2 for _, position in places(order, 4000, 30))

    assert drawn[1] == pytest.approx(1000, abs=83)  # easy: 1 of 4; 3 sqrt(4000 * 3 / 16) = 82


def test_a_pool_of_weight_0_is_not_drawn_unless_nothing_else_is_left():
    order = make(pools(9), easy_weight=0.0, hard_weight=0.0)
    places(order, 9)
    sorted_into(order, 9)
    assert {position % 3 for _, position in places(order, 300, 9)} == {1}

    for position in (1, 4, 7):
        order.observe((0, position), played(1.0))
    drawn = {position for _, position in places(order, 300, 309)}
    assert drawn == set(range(9))  # easy and hard alike, rather than no batch at all


def test_within_a_pool_the_example_that_was_played_longest_ago_comes_next():
    order = make(pools(12))
    places(order, 12)
    sorted_into(order, 12)
    drawn = [position for _, position in places(order, 600, 12)]
    for n in range(3):
        own = [position for position in drawn if position % 3 == n]
        assert all(own[i] == own[i - 4] for i in range(4, len(own)))
        assert len(set(own[:4])) == 4


def test_what_was_never_played_is_normal_and_comes_before_what_was():
    order = make(pools(20), easy_weight=0.5, normal_weight=0.5)
    first = places(order, 8)
    for place in first:
        order.observe(place, played(1.0))
    # Four places more, all of them fresh where the pool is `normal`.
    later = [place for place in places(order, 24, 8) if place not in first]

    assert len(later) == len(set(later)) >= 8
    assert order.metrics() == {
        "easy": 0.4,
        "normal": 0.6,
        "hard": 0.0,
        "seen": float(8 + len(later)),
    }


def test_an_example_that_always_fails_holds_nobody_up_and_is_not_forgotten():
    order = make(pools(10))
    drawn = Counter()
    for index in range(2000):
        place = order.next(index)
        drawn[place] += 1
        order.observe(place, played(0.0 if place[1] == 3 else 0.5))

    assert level_of(order, (0, 3)) == "hard"
    assert drawn[0, 3] == pytest.approx(2000 / 9, abs=45)  # 0.1 of 0.9, for no pool is easy


def test_examples_that_cannot_be_scored_come_by_turns_as_before():
    order = make(pools(4))
    drawn = []
    for index in range(12):
        place = order.next(index)
        drawn.append(place[1])
        order.observe(place, played(None))

    assert drawn[:4] == drawn[4:8] == drawn[8:]
    assert sorted(drawn[:4]) == [0, 1, 2, 3]


def test_each_environment_of_a_mixture_has_pools_of_its_own():
    order = make(pools(3, 3, weights=(1.0, 3.0)))
    seen = set(places(order, 40))
    assert len(seen) == 6
    for position in range(3):
        order.observe((0, position), played(1.0))
    drawn = Counter(places(order, 4000, 40))

    # All of e0 are easy: that environment is drawn as often as before, and e1 is not changed.
    of_first = sum(count for (pool, _), count in drawn.items() if pool == 0)
    assert of_first == pytest.approx(1000, abs=83)
    assert order.metrics()["easy"] == 0.5
    assert level_of(order, (1, 0)) == "normal"


def reward_of(place: tuple[int, int], index: int) -> float:
    return Random(f"{place}:{index // 7}").choice([0.0, 0.1, 0.5, 0.9, 1.0])


def go_on(order: DifficultyOrder, first: int, last: int) -> list[tuple[int, int]]:
    """Draw and observe, each group two draws after its own."""
    drawn = []
    for index in range(first, last):
        place = order.next(index)
        drawn.append(place)
        order.observe(place, played(reward_of(place, index)))
    return drawn


@pytest.mark.parametrize("cut", [0, 1, 13, 60, 200])
def test_a_resumed_order_has_the_same_pools_and_goes_on_alike(cut):
    given = pools(40, 15, weights=(2.0, 1.0))
    whole, before, after = (make(given, 4) for _ in range(3))
    expected = go_on(whole, 0, 300)
    assert go_on(before, 0, cut) == expected[:cut]

    after.load(json.loads(json.dumps(before.state())))
    assert after.metrics() == before.metrics()
    assert go_on(after, cut, 300) == expected[cut:]
    assert after.state() == whole.state()


def test_a_checkpoint_of_other_examples_is_refused_with_both_numbers():
    state = make(pools(4)).state()
    with pytest.raises(ValueError, match=r"how hard \[4\] examples are, and the environment has"):
        make(pools(5)).load(state)


def test_a_checkpoint_holds_the_examples_that_were_played_and_no_others():
    order = make(pools(1000))
    places(order, 5)

    (levels,) = order.state()["played"]
    assert {level: len(positions) for level, positions in levels.items()} == {
        "easy": 0,
        "normal": 5,
        "hard": 0,
    }
