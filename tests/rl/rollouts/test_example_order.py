"""Orders choose the next example, and a resumed run continues at the same place."""

import json
from collections import Counter

import pytest

from envs.episode import Example
from envs.protocol import Pool
from rl.rollouts.difficulty_order import DifficultyOrder
from rl.rollouts.example_order import ExampleOrder, SequentialOrder, ShuffledOrder
from tests.support.orders import begun

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


def places(order: ExampleOrder, count: int, first: int = 0) -> list[tuple[int, int]]:
    return [order.next(index) for index in range(first, first + count)]


@pytest.fixture(params=ORDERS)
def make(request):
    """Return a function that begins an order; the tests run with every order."""
    return lambda given, seed=0: begun(ORDERS[request.param](), given, seed)


def test_no_example_repeats_before_the_rest_of_its_pool(make):
    drawn = places(make(pools(3, 7, weights=(1.0, 2.0))), 210)
    for pool, size in enumerate((3, 7)):
        own = [position for n, position in drawn if n == pool]
        whole = len(own) - len(own) % size
        parts = [own[i : i + size] for i in range(0, whole, size)]
        assert all(sorted(part) == list(range(size)) for part in parts)


def test_the_environments_of_a_mixture_are_drawn_by_weight(make):
    drawn = Counter(pool for pool, _ in places(make(pools(5, 5, 5, weights=(1, 2, 5))), 8000))
    # Three standard deviations of a binomial: 3 sqrt(8000 p (1 - p)) <= 130.
    assert [drawn[n] for n in range(3)] == pytest.approx([1000, 2000, 5000], abs=130)


@pytest.mark.parametrize("cut", [0, 1, 7, 25])
def test_a_resumed_order_continues_at_the_same_place(make, cut):
    given = pools(6, 4)
    whole, before, after = make(given), make(given), make(given)
    expected = places(whole, 50)
    assert places(before, cut) == expected[:cut]
    after.load(json.loads(json.dumps(before.state())))
    assert places(after, 50 - cut, cut) == expected[cut:]
    assert after.state() == whole.state()


def test_the_error_for_a_missing_place_names_the_sizes_of_the_pools(make):
    order = make(pools(3, 2))
    for place in ((0, 3), (1, 2), (2, 0), (0, -1), (-1, 0)):
        with pytest.raises(ValueError, match=r"has no example .* pools have \[3, 2\] examples"):
            order.example(place)


@pytest.mark.parametrize("given", [[], pools(0), pools(3, 0)])
def test_an_environment_without_examples_is_refused(make, given):
    with pytest.raises(ValueError, match="no training examples"):
        make(given)


def test_the_shuffled_order_is_that_of_earlier_versions():
    """These numbers were recorded with an earlier version, whose runs can be resumed."""
    order = begun(ShuffledOrder(), pools(6), 0)
    assert [position for _, position in places(order, 14)] == [
        *(0, 1, 4, 5, 3, 2),
        *(5, 3, 1, 2, 0, 4),
        *(1, 0),
    ]
    mixture = begun(ShuffledOrder(), pools(5, 3, weights=(1.0, 2.0)), 7)
    assert places(mixture, 14) == [
        *((0, 3), (0, 1), (1, 0), (0, 4), (1, 2), (1, 1), (0, 2)),
        *((1, 0), (0, 0), (1, 2), (0, 3), (0, 2), (1, 1), (1, 2)),
    ]


def test_the_shuffled_order_depends_only_on_seed_and_index():
    def drawn(indices):
        order = begun(ShuffledOrder(), pools(10), 0)
        return {index: order.next(index) for index in indices}

    assert drawn(range(30)) == drawn(reversed(range(30)))


def test_sequential_is_the_order_of_the_data_pass_after_pass():
    order = begun(SequentialOrder(), pools(3), 5)
    assert [position for _, position in places(order, 8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    mixture = places(begun(SequentialOrder(), pools(2, 3), 5), 40)
    for pool, size in enumerate((2, 3)):
        own = [position for n, position in mixture if n == pool]
        assert own == [i % size for i in range(len(own))]
        assert len(own) > 10


def test_an_order_that_observes_groups_needs_a_state():
    class Forgetful(ExampleOrder):
        def observe(self, place, group): ...

        def state(self):
            return {}

    class Whole(Forgetful):
        def load(self, state): ...

    with pytest.raises(ValueError, match="Forgetful observes groups, but a resumed run would lose"):
        Forgetful()
    assert Whole().metrics() == {}
