"""An order that plays sooner what the policy gets right sometimes, but not always.

A group whose rollouts all earn the same has no advantage and teaches nothing; one teaches the most
where its rewards differ most, p * (1 - p) for a share p of right answers. Before each group a few
examples are drawn at random, and the one whose last group had the largest variance is played.
What was never played counts as infinitely variable, so everything is tried once.

Sampling for learnability: Rutherford et al., arXiv:2408.15099; of reasoning: Foster et al.,
arXiv:2502.12272.
"""

from collections.abc import Sequence
from random import Random
from statistics import pvariance
from typing import Any

from envs.protocol import Pool
from rl.records import Group
from rl.rollouts.example_order import ExampleOrder, Place


class FrontierOrder(ExampleOrder):
    """The most variable of `num_candidates` examples; 1 is drawing at random."""

    def __init__(self, *, num_candidates: int) -> None:
        if num_candidates < 1:
            raise ValueError(f"num_candidates={num_candidates} leaves nothing to play: use 4 or so")
        self.num_candidates = num_candidates

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Begin knowing nothing."""
        super().begin(pools, seed)
        self._variances: dict[Place, float] = {}

    def next(self, index: int) -> Place:
        """Return where group `index` is played; the same for the same index and observations."""
        # One generator a group, so that there is none to keep in a checkpoint.
        rng = Random(f"{self.seed}:{index}")
        (pool,) = rng.choices(range(len(self.pools)), [pool.weight for pool in self.pools])
        size = len(self.pools[pool].examples)
        candidates = rng.sample(range(size), min(self.num_candidates, size))
        places = [(pool, position) for position in candidates]
        return max(places, key=lambda place: self._variances.get(place, float("inf")))

    def observe(self, place: Place, group: Group) -> None:
        """Remember how far the rewards of a group lie apart."""
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        if rewards:
            self._variances[place] = pvariance(rewards)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must know; JSON has no pairs as keys, hence the rows."""
        return {"variances": [[*place, variance] for place, variance in self._variances.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there; a run that begins is given nothing."""
        rows = state.get("variances", [])
        self._variances = {(pool, position): variance for pool, position, variance in rows}

    def metrics(self) -> dict[str, float]:
        """Return what is logged, as order/mean_variance."""
        known = self._variances.values()
        return {"mean_variance": sum(known) / len(known) if known else 0.0}
