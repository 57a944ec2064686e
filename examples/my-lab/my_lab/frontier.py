"""An order that prefers examples which the policy solves sometimes, but not always.

A group with equal rewards has no advantage and teaches nothing. A group teaches the most if its
rewards vary the most, by p * (1 - p) for a share p of right answers. For each group a few examples
are drawn at random, and the example whose last group had the largest variance is played. An example
that was never played counts as infinitely variable, so that every example is tried once.

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
    """Plays the most variable of `num_candidates` examples; 1 draws at random."""

    def __init__(self, *, num_candidates: int) -> None:
        if num_candidates < 1:
            raise ValueError(f"num_candidates={num_candidates} leaves nothing to play: use 4 or so")
        self.num_candidates = num_candidates

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Start without any observation."""
        super().begin(pools, seed)
        self._variances: dict[Place, float] = {}

    def next(self, index: int) -> Place:
        """Return the place of group `index`: the same for the same index and observations."""
        # Use one RNG per group, so that checkpoints need not store RNG state.
        rng = Random(f"{self.seed}:{index}")
        (pool,) = rng.choices(range(len(self.pools)), [pool.weight for pool in self.pools])
        size = len(self.pools[pool].examples)
        candidates = rng.sample(range(size), min(self.num_candidates, size))
        places = [(pool, position) for position in candidates]
        return max(places, key=lambda place: self._variances.get(place, float("inf")))

    def observe(self, place: Place, group: Group) -> None:
        """Remember the variance of the rewards of a group."""
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        if rewards:
            self._variances[place] = pvariance(rewards)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as rows because JSON has no pairs as keys."""
        return {"variances": [[*place, variance] for place, variance in self._variances.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state; a new run calls this with an empty one."""
        rows = state.get("variances", [])
        self._variances = {(pool, position): variance for pool, position, variance in rows}

    def metrics(self) -> dict[str, float]:
        """Return metrics, logged as order/mean_variance."""
        known = self._variances.values()
        return {"mean_variance": sum(known) / len(known) if known else 0.0}
