"""Orders choose the next example, and a resumed run continues at the same place."""

import json
from collections import Counter
from random import Random

import pytest

from envs.episode import Example
from envs.protocol import Pool
from rl.rollouts.difficulty_order import DifficultyOrder
from rl.rollouts.example_order import ExampleOrder, SequentialOrder, ShuffledOrder
from tests.support.rollouts import begun, graded

KNOBS = {
    **{"easy_threshold": 0.8, "hard_threshold": 0.2},
    **{"easy_weight": 0.1, "normal_weight": 0.8, "hard_weight": 0.1},
}
ORDERS = {
    "sequential": SequentialOrder,
    "shuffled": ShuffledOrder,
    "difficulty": lambda: DifficultyOrder(**KNOBS),
}


def pools(*sizes: int, weights: tuple[float, ...] | None = None) -> list[Pool]:
    """Return one environment e0, e1, ... for each size."""
    return [
        Pool(weight, [Example(i, f"e{n}", []) for i in range(size)])
        for n, (size, weight) in enumerate(zip(sizes, weights or (1.0,) * len(sizes), strict=True))
    ]


def places(order: ExampleOrder, count: int) -> list[tuple[int, int]]:
    return [order.next(index) for index in range(count)]


@pytest.fixture(params=ORDERS)
def make(request):
    """Return a function that begins an order; the tests run with every order."""
    return lambda given, seed=0: begun(ORDERS[request.param](), given, seed)


def test_pools_are_drawn_by_weight_and_no_example_repeats_before_the_rest_of_its_pool(make):
    drawn = places(make(pools(3, 7, weights=(1.0, 2.0))), 210)
    for pool, size in enumerate((3, 7)):
        own = [position for n, position in drawn if n == pool]
        whole = len(own) - len(own) % size
        parts = [own[i : i + size] for i in range(0, whole, size)]
        assert all(sorted(part) == list(range(size)) for part in parts)
    drawn = Counter(pool for pool, _ in places(make(pools(5, 5, 5, weights=(1, 2, 5))), 8000))
    # Three standard deviations of a binomial: 3 sqrt(8000 p (1 - p)) <= 130.
    assert [drawn[n] for n in range(3)] == pytest.approx([1000, 2000, 5000], abs=130)


def test_the_error_for_a_missing_place_names_the_sizes_of_the_pools(make):
    order = make(pools(3, 2))
    for place in ((0, 3), (1, 2), (2, 0), (0, -1), (-1, 0)):
        with pytest.raises(ValueError, match=r"has no example .* pools have \[3, 2\] examples"):
            order.example(place)


@pytest.mark.parametrize("given", [[], pools(3, 0)])
def test_an_environment_without_examples_is_refused(make, given):
    with pytest.raises(ValueError, match="no training examples"):
        make(given)


def test_the_shuffled_order_is_that_of_earlier_versions_and_depends_only_on_seed_and_index():
    """These numbers were recorded with an earlier version, whose runs can be resumed."""
    order = begun(ShuffledOrder(), pools(6), 0)
    numbers = [position for _, position in places(order, 14)]
    assert numbers == [0, 1, 4, 5, 3, 2, 5, 3, 1, 2, 0, 4, 1, 0]
    mixture = begun(ShuffledOrder(), pools(5, 3, weights=(1.0, 2.0)), 7)
    assert places(mixture, 14) == [
        *((0, 3), (0, 1), (1, 0), (0, 4), (1, 2), (1, 1), (0, 2)),
        *((1, 0), (0, 0), (1, 2), (0, 3), (0, 2), (1, 1), (1, 2)),
    ]

    def drawn(indices):
        order = begun(ShuffledOrder(), pools(10), 0)
        return {index: order.next(index) for index in indices}

    assert drawn(range(30)) == drawn(reversed(range(30)))


def test_sequential_is_the_order_of_the_data_pass_after_pass():
    order = begun(SequentialOrder(), pools(3), 5)
    assert [position for _, position in places(order, 8)] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_an_order_that_observes_groups_needs_a_state():
    methods = {"observe": lambda *_: None, "state": lambda _: {}}
    with pytest.raises(ValueError, match="Forgetful observes groups, but a resumed run would lose"):
        type("Forgetful", (ExampleOrder,), methods)()
    type("Whole", (ExampleOrder,), {**methods, "load": lambda *_: None})()


LEVELS = ("easy", "normal", "hard")


def difficulty(given, seed=0, **knobs):
    return begun(DifficultyOrder(**{**KNOBS, **knobs}), given, seed)


def test_the_mean_reward_of_a_group_decides_the_level_of_its_example():
    for rewards, level in (
        ((0.6, 1.0), "easy"),  # the threshold itself
        ((0.0, 0.5), "normal"),  # 0.25
        ((0.0, 0.4), "hard"),  # 0.2, the threshold itself
        ((1.0, None), "easy"),  # the mean of the scored rollouts
    ):
        order = difficulty(pools(5))
        place = order.next(0)
        order.observe(place, graded(rewards))
        (levels,) = order.state()["played"]
        assert levels == {name: [place[1]] if name == level else [] for name in LEVELS}


@pytest.mark.parametrize(
    ("seed", "weights", "expected"),  # weights of easy, normal, hard
    [
        (0, (0.1, 0.8, 0.1), "cdbaBaecAdBABAaeBdBAddbedBBecAadBeAbcadeBebcdeAebeBdAbbAabAc"),
        (3, (1.0, 5.0, 3.0), "cdAbaedbdBBcBaedaebdBABdcccAedeeBcabdeecBBeBaABAdebBaAdcbeaA"),
        (4, (0.1, 0.0, 0.0), "beeeAeAeeeeAeeeeAAeBeBBeeeeeeeBeAeABAedBdBdBdBdBBdBBbbBbbbBb"),
    ],
)
def test_a_level_is_drawn_by_its_weight_then_what_was_drawn_longest_ago(seed, weights, expected):
    """A naive model, which knew only levels and last draws, has drawn these examples, too."""
    names = ("easy_weight", "normal_weight", "hard_weight")
    given = pools(5, 2, weights=(2.0, 1.0))
    order = difficulty(given, seed, **dict(zip(names, weights, strict=True)))
    drawn = [("abcde", "AB")[pool][position] for pool, position in continued(order, 0, 60)]
    assert "".join(drawn) == expected


def test_the_metrics_are_the_shares_of_the_levels_and_the_number_of_played_examples():
    order = difficulty(pools(20), easy_weight=0.5, normal_weight=0.5)
    for place in places(order, 8):
        order.observe(place, graded([1.0]))
    assert order.metrics() == {"easy": 0.4, "normal": 0.6, "hard": 0.0, "seen": 8.0}


def reward_of(place: tuple[int, int], index: int) -> float | None:
    return Random(f"{place}:{index // 7}").choice([None, 0.0, 0.1, 0.2, 0.5, 0.8, 0.9, 1.0])


def continued(order: ExampleOrder, first: int, last: int) -> list[tuple[int, int]]:
    """Draw and observe groups."""
    drawn = []
    for index in range(first, last):
        drawn.append(order.next(index))
        order.observe(drawn[-1], graded([reward_of(drawn[-1], index)]))
    return drawn


@pytest.mark.parametrize("cut", [0, 13, 200])
def test_a_resumed_order_continues_as_if_it_had_not_stopped(make, cut):
    given = pools(40, 15, weights=(2.0, 1.0))
    whole, before, after = (make(given, 4) for _ in range(3))
    expected = continued(whole, 0, 300)
    assert continued(before, 0, cut) == expected[:cut]
    after.load(json.loads(json.dumps(before.state())))
    assert after.metrics() == before.metrics()
    assert continued(after, cut, 300) == expected[cut:]
    assert after.state() == whole.state()


def test_a_checkpoint_holds_only_played_examples_and_one_of_other_examples_is_refused():
    order = difficulty(pools(1000))
    places(order, 5)
    (levels,) = order.state()["played"]
    counts = {level: len(positions) for level, positions in levels.items()}
    assert counts == {"easy": 0, "normal": 5, "hard": 0}
    state = difficulty(pools(4)).state()
    with pytest.raises(ValueError, match=r"pools had \[4\] examples at the checkpoint, but have"):
        difficulty(pools(5)).load(state)
