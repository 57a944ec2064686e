"""Which example the i-th group of a run plays, a function of seed and i alone.

    pools (weight, examples) -> draw a pool by weight -> the next example of its own shuffled pass

Every pool is gone through in a new order at each pass, so a small one is repeated evenly.
"""

import random
from collections.abc import Sequence

from envs.episode import Example
from envs.protocol import Pool


class ExampleOrder:
    """`order[i]` is the example of group i."""

    def __init__(self, pools: Sequence[Pool], seed: int) -> None:
        if not pools or any(not pool.examples for pool in pools):
            raise ValueError("the environment has no training examples")
        self._pools = [_Passes(pool.examples, f"{seed}:{n}") for n, pool in enumerate(pools)]
        self._weights = [pool.weight for pool in pools]
        self._random = random.Random(seed)
        self._places: list[tuple[int, int]] = []  # of group i: its pool, and how many came before
        self._drawn = [0] * len(pools)

    def __getitem__(self, index: int) -> Example:
        while len(self._places) <= index:
            (pool,) = self._random.choices(range(len(self._pools)), self._weights)
            self._places.append((pool, self._drawn[pool]))
            self._drawn[pool] += 1
        pool, position = self._places[index]
        return self._pools[pool].example(position)


class _Passes:
    """One pool, shuffled anew for every pass."""

    def __init__(self, examples: Sequence[Example], seed: str) -> None:
        self._examples, self._seed = examples, seed
        self._pass, self._order = -1, list[int]()

    def example(self, index: int) -> Example:
        number, position = divmod(index, len(self._examples))
        if number != self._pass:
            self._pass, self._order = number, list(range(len(self._examples)))
            random.Random(f"{self._seed}:{number}").shuffle(self._order)
        return self._examples[self._order[position]]
