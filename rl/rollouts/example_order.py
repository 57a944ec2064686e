"""The orders of conf/order. An order chooses the example that the next group plays.

    pools (weight, examples)        one pool per environment of a mixture
      | draw a pool by weight       the seed of the run decides every random choice
      v
    place (pool, position)          sequential: pass after pass, in the order of the data
                                    shuffled: pass after pass, each pass in another order
                                    difficulty: by earlier rewards (rl/rollouts/difficulty_order.py)

A resumed run repeats the groups that no step has trained, with the same examples. The dispatcher
stores the places of these examples, so an order stores only its statistics of observed groups.
"""

import random
from collections.abc import Sequence
from typing import Any, Self

from envs.episode import Example
from envs.protocol import Pool
from rl.records import Group

Place = tuple[int, int]
"""(pool, position in its examples)"""


class ExampleOrder:
    """Base class of all orders. The constructor of a subclass gets the options of conf/order."""

    pools: Sequence[Pool]  # the examples of each environment; set by `begin`
    seed: int  # the seed of the run; set by `begin`

    def __new__(cls, **_options: object) -> Self:
        forgets = cls.state is ExampleOrder.state or cls.load is ExampleOrder.load
        if cls.observe is not ExampleOrder.observe and forgets:
            raise ValueError(
                f"{cls.__qualname__} observes groups, but a resumed run would lose its state: "
                "define state() and load()"
            )
        return super().__new__(cls)

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Set `pools` and `seed`. Call this method first. Raise ValueError if a pool is empty."""
        if not pools or any(not pool.examples for pool in pools):
            raise ValueError('no training examples: check the data or pools("train") of the env')
        self.pools, self.seed = pools, seed

    def next(self, index: int) -> Place:
        """Return the place of the example of group `index`. Later calls have a larger `index`."""
        raise NotImplementedError

    def example(self, place: Place) -> Example:
        """Return the example at a place. Raise ValueError if the place does not exist."""
        pool, position = place
        sizes = [len(pool.examples) for pool in self.pools]
        if not (0 <= pool < len(sizes) and 0 <= position < sizes[pool]):
            raise ValueError(
                f"{type(self).__name__}: pool {pool} has no example {position}, because the pools "
                f"have {sizes} examples: resume with the same data, or start a new run"
            )
        return self.pools[pool].examples[position]

    def observe(self, place: Place, group: Group) -> None:
        """Update the order with a finished group, even if the buffer rejects the group.

        By default do nothing. After a resume the same group may be observed a second time.
        """

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON values; by default an empty dict."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a result of `state()`. The argument is {} if no earlier state exists."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics that each step logs as `order/<name>`; by default an empty dict."""
        return {}


class SequentialOrder(ExampleOrder):
    """Draws the examples of each pool in data order, pass after pass (conf/order/sequential)."""

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        super().begin(pools, seed)
        self._random = random.Random(seed)
        # For each group: its pool, and the number of earlier groups of this pool.
        self._draws: list[tuple[int, int]] = []
        self._num_drawn = [0] * len(pools)

    def next(self, index: int) -> Place:
        """Return the place of group `index`. The seed, the pools and the index determine it."""
        weights = [pool.weight for pool in self.pools]
        while len(self._draws) <= index:
            (pool,) = self._random.choices(range(len(weights)), weights)
            self._draws.append((pool, self._num_drawn[pool]))
            self._num_drawn[pool] += 1
        pool, count = self._draws[index]
        pass_number, i = divmod(count, len(self.pools[pool].examples))
        return pool, self._positions_in_pass(pool, pass_number)[i]

    def _positions_in_pass(self, pool: int, pass_number: int) -> Sequence[int]:  # noqa: ARG002 for subclasses
        return range(len(self.pools[pool].examples))


class ShuffledOrder(SequentialOrder):
    """Plays each pool in a new random order at each pass (conf/order/shuffled)."""

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        super().begin(pools, seed)
        self._passes: list[tuple[int, list[int]]] = [(-1, [])] * len(pools)  # (pass, positions)

    def _positions_in_pass(self, pool: int, pass_number: int) -> Sequence[int]:
        size = len(self.pools[pool].examples)  # may grow, because an environment may add examples
        if (pass_number, size) != (self._passes[pool][0], len(self._passes[pool][1])):
            positions = list(range(size))
            random.Random(f"{self.seed}:{pool}:{pass_number}").shuffle(positions)
            self._passes[pool] = pass_number, positions
        return self._passes[pool][1]
