"""Begin example orders."""

from collections.abc import Sequence

from envs.protocol import Pool
from rl.rollouts.example_order import ExampleOrder


def begun(order: ExampleOrder, pools: Sequence[Pool], seed: int) -> ExampleOrder:
    """Begin the order and return it."""
    order.begin(pools, seed)
    return order
