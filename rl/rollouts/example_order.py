"""Which example the next group plays: the choices of conf/order, and what one of your own is.

    pools (weight, examples)        of a mixture; any other environment has one
      | draw a pool by weight       in every order, by seed and index alone
      v
    place (pool, position)          sequential: pass after pass, as the data has them
                                    shuffled: pass after pass, each in another order
                                    difficulty: by rewards (rl/rollouts/difficulty_order.py)

What was started and not trained on when a run stopped is played again at the same place: the
dispatcher keeps those, so an order need remember nothing but what it learned.
"""

import random
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from envs.episode import Example
from envs.protocol import Pool
from rl.records import Group

Place = tuple[int, int]
"""(pool, position in its examples)"""


class ExampleOrder:
    """Base of all orders. Constructed with its knobs alone, before anything is started.

    Attributes:
        pools: the examples, by environment; there from `begin` on.
        seed: of the run, likewise.

    """

    pools: Sequence[Pool]
    seed: int

    def __new__(cls, **_knobs: object) -> Self:
        """Refuse an order that learns from groups and would forget it on a resume."""
        forgets = cls.state is ExampleOrder.state or cls.load is ExampleOrder.load
        if cls.observe is not ExampleOrder.observe and forgets:
            raise ValueError(
                f"{cls.__qualname__} observes groups and a resumed run would know nothing of them: "
                "give it state() and load(), too"
            )
        return super().__new__(cls)

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Take the examples; called once, before everything below.

        Raises:
            ValueError: a pool is empty.

        """
        if not pools or any(not pool.examples for pool in pools):
            raise ValueError("the environment has no training examples")
        self.pools, self.seed = pools, seed

    def next(self, index: int) -> Place:
        """Return the place of group `index`; called once for each, in rising order."""
        raise NotImplementedError

    def example(self, place: Place) -> Example:
        """Return the example at a place.

        Raises:
            ValueError: there is no such place.

        """
        pool, position = place
        sizes = [len(pool.examples) for pool in self.pools]
        if not (0 <= pool < len(sizes) and 0 <= position < sizes[pool]):
            raise ValueError(
                f"{type(self).__name__}: there is no example {position} in pool {pool}, for the "
                f"pools hold {sizes}: a resumed run needs the examples that it began with"
            )
        return self.pools[pool].examples[position]

    def observe(self, place: Place, group: Group) -> None:
        """Learn from a group that has finished, whether it is trained on or not.

        Here: nothing. A group that was played again after a resume may come a second time.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: plain values. Here: nothing."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; from nothing where the checkpoint holds nothing."""

    def metrics(self) -> dict[str, float]:
        """Return what is logged with each batch, as order/<name>. Here: nothing."""
        return {}


class SequentialOrder(ExampleOrder):
    """Every pool from its first example to its last, pass after pass (conf/order/sequential)."""

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Begin before the first group."""
        super().begin(pools, seed)
        self._random = random.Random(seed)
        self._turns: list[tuple[int, int]] = []  # of group i: its pool, and how many came before
        self._drawn = [0] * len(pools)

    def next(self, index: int) -> Place:
        """Return the place of group `index`, a function of seed and index alone."""
        weights = [pool.weight for pool in self.pools]
        while len(self._turns) <= index:
            (pool,) = self._random.choices(range(len(weights)), weights)
            self._turns.append((pool, self._drawn[pool]))
            self._drawn[pool] += 1
        pool, count = self._turns[index]
        number, position = divmod(count, len(self.pools[pool].examples))
        return pool, self._arranged(pool, number)[position]

    def _arranged(self, pool: int, number: int) -> Sequence[int]:  # noqa: ARG002 for subclasses
        """The positions of a pool in the order of its pass `number`."""
        return range(len(self.pools[pool].examples))


class ShuffledOrder(SequentialOrder):
    """Every pool in another order at each pass (conf/order/shuffled)."""

    NEUTRAL: ClassVar[bool] = True

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Begin before the first group."""
        super().begin(pools, seed)
        self._passes: list[tuple[int, list[int]]] = [(-1, [])] * len(pools)

    def _arranged(self, pool: int, number: int) -> Sequence[int]:
        """One pass of each pool is kept at a time."""
        if number != self._passes[pool][0]:
            positions = list(range(len(self.pools[pool].examples)))
            random.Random(f"{self.seed}:{pool}:{number}").shuffle(positions)
            self._passes[pool] = number, positions
        return self._passes[pool][1]
