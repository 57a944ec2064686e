"""Begin example orders, and read examples from them."""

from collections.abc import Sequence

from envs.episode import Example
from envs.protocol import Pool
from rl.rollouts.example_order import ExampleOrder, ShuffledOrder


def begun(order: ExampleOrder, pools: Sequence[Pool], seed: int) -> ExampleOrder:
    """Begin the order and return it."""
    order.begin(pools, seed)
    return order


def shuffled(pools: Sequence[Pool], seed: int) -> ExampleOrder:
    """Return the default order, begun."""
    return begun(ShuffledOrder(), pools, seed)


def examples(order: ExampleOrder, count: int) -> list[Example]:
    """Return the examples of the first `count` groups."""
    return [order.example(order.next(index)) for index in range(count)]
