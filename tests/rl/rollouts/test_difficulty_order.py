"""DifficultyOrder draws what a simple model of it draws, and a resumed run continues alike."""

import json
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
    """Return a group with these rewards."""
    rollouts = tuple(Rollout((), [], r, {}, StopReason.STOP, 1, 0.0) for r in rewards)
    return Group(0, Example(0, "e0", []), 0, rollouts, ())


def level_of(order: DifficultyOrder, place: tuple[int, int]) -> str:
    """Return the level of an example in the state of a checkpoint."""
    levels = order.state()["played"][place[0]]
    return next((level for level in LEVELS if place[1] in levels[level]), "unplayed")


@pytest.mark.parametrize(
    ("rewards", "level"),
    [
        ((1.0, 1.0), "easy"),
        ((0.6, 1.0), "easy"),  # the threshold itself
        ((0.5, 1.0), "normal"),
        ((0.0, 1.0), "normal"),
        ((0.0, 0.5), "normal"),  # 0.25
        ((0.0, 0.4), "hard"),  # 0.2, the threshold itself
        ((0.0, 0.0), "hard"),
        ((1.0, None), "easy"),  # the mean of the scored rollouts
        ((0.0,), "hard"),  # a group of one
        ((None, None), "normal"),  # an unscorable group changes nothing
    ],
)
def test_the_mean_reward_of_a_group_decides_the_level_of_its_example(rewards, level):
    order = make(pools(5))
    place = order.next(0)
    order.observe(place, played(*rewards))
    assert level_of(order, place) == level


def naive(given, seed: int, count: int, **weights: float) -> list[tuple[int, int]]:
    """Return the places that DifficultyOrder draws, from the levels and last draws alone."""
    chances = {level: weights.get(f"{level}_weight", KNOBS[f"{level}_weight"]) for level in LEVELS}
    levels, drawn = {}, {}  # by place; an unplayed example is normal and has a negative draw
    for pool, examples in enumerate(given):
        shuffled = list(range(len(examples.examples)))
        Random(f"{seed}:{pool}").shuffle(shuffled)
        for i, position in enumerate(shuffled):
            levels[pool, position], drawn[pool, position] = "normal", i - len(shuffled)
    places = []
    for index in range(count):
        rng = Random(f"{seed}:{index}")
        (pool,) = rng.choices(range(len(given)), [examples.weight for examples in given])
        own = [place for place in levels if place[0] == pool]
        filled = [level for level in LEVELS if level in {levels[place] for place in own}]
        shares = [chances[level] for level in filled]
        (level,) = rng.choices(filled, shares if any(shares) else None)
        place = min((p for p in own if levels[p] == level), key=drawn.__getitem__)
        drawn[place] = index
        reward = reward_of(place, index)
        if reward is not None:
            levels[place] = "easy" if reward >= 0.8 else "hard" if reward <= 0.2 else "normal"
        places.append(place)
    return places


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"easy_weight": 1.0, "normal_weight": 5.0, "hard_weight": 3.0},
        {"easy_weight": 0.0, "hard_weight": 0.0},
        {"normal_weight": 0.0, "hard_weight": 0.0},
    ],
)
@pytest.mark.parametrize("seed", [0, 4])
def test_the_order_draws_what_the_naive_model_draws(seed, weights):
    given = pools(12, 5, weights=(2.0, 1.0))
    assert continued(make(given, seed, **weights), 0, 400) == naive(given, seed, 400, **weights)


def test_the_metrics_are_the_shares_of_the_levels_and_the_number_of_played_examples():
    order = make(pools(20), easy_weight=0.5, normal_weight=0.5)
    for place in places(order, 8):
        order.observe(place, played(1.0))
    assert order.metrics() == {"easy": 0.4, "normal": 0.6, "hard": 0.0, "seen": 8.0}
    order.pools[0].examples.append(Example(20, "e0", []))  # no rollout has played the added example
    assert order.metrics() == {"easy": 0.4, "normal": 0.6, "hard": 0.0, "seen": 8.0}


def reward_of(place: tuple[int, int], index: int) -> float | None:
    return Random(f"{place}:{index // 7}").choice([None, 0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0])


def continued(order: DifficultyOrder, first: int, last: int) -> list[tuple[int, int]]:
    """Draw and observe groups."""
    drawn = []
    for index in range(first, last):
        drawn.append(order.next(index))
        order.observe(drawn[-1], played(reward_of(drawn[-1], index)))
    return drawn


@pytest.mark.parametrize("cut", [0, 1, 13, 60, 200])
def test_a_resumed_order_continues_as_if_it_had_not_stopped(cut):
    given = pools(40, 15, weights=(2.0, 1.0))
    whole, before, after = (make(given, 4) for _ in range(3))
    expected = continued(whole, 0, 300)
    assert continued(before, 0, cut) == expected[:cut]
    after.load(json.loads(json.dumps(before.state())))
    assert after.metrics() == before.metrics()
    assert continued(after, cut, 300) == expected[cut:]
    assert after.state() == whole.state()


def test_a_checkpoint_of_other_examples_is_refused():
    state = make(pools(4)).state()
    with pytest.raises(ValueError, match=r"pools had \[4\] examples at the checkpoint, but have"):
        make(pools(5)).load(state)


def test_a_checkpoint_holds_only_played_examples():
    order = make(pools(1000))
    places(order, 5)
    (levels,) = order.state()["played"]
    assert {level: len(positions) for level, positions in levels.items()} == {
        "easy": 0,
        "normal": 5,
        "hard": 0,
    }
