"""Example orders that have begun, and what they give."""

from collections.abc import Sequence

from envs.episode import Example
from envs.protocol import Pool
from rl.rollouts.example_order import ExampleOrder, ShuffledOrder


def begun(order: ExampleOrder, pools: Sequence[Pool], seed: int) -> ExampleOrder:
    """The order itself, ready for its first group."""
    order.begin(pools, seed)
    return order


def shuffled(pools: Sequence[Pool], seed: int) -> ExampleOrder:
    """The default order."""
    return begun(ShuffledOrder(), pools, seed)


def examples(order: ExampleOrder, count: int) -> list[Example]:
    """What the first `count` groups play."""
    return [order.example(order.next(index)) for index in range(count)]
