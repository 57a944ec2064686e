"""An order that prefers examples which the policy solves sometimes, but not always.

A group with equal rewards has no advantage and teaches nothing. A group teaches most if its rewards
have the largest variance, which is p * (1 - p) for a share p of right answers. For each group the
order draws a few random examples, and plays the one whose last group had the largest variance. The
variance of an unplayed example counts as infinite, so that the order prefers this example.

This is sampling for learnability: Rutherford et al., arXiv:2408.15099, and for reasoning Foster et
al., arXiv:2502.12272.
"""

from collections.abc import Sequence
from random import Random
from statistics import pvariance
from typing import Any

from envs.protocol import Pool
from rl.records import Group
from rl.rollouts.example_order import ExampleOrder, Place


class FrontierOrder(ExampleOrder):
    """Order that plays the example with the largest variance of `num_candidates` random ones."""

    def __init__(self, *, num_candidates: int) -> None:
        if num_candidates < 1:
            raise ValueError(f"num_candidates={num_candidates}: set it to at least 1, such as 4")
        self.num_candidates = num_candidates

    def begin(self, pools: Sequence[Pool], seed: int) -> None:
        """Set pools and seed. No group has been observed yet."""
        super().begin(pools, seed)
        self._variances: dict[Place, float] = {}

    def next(self, index: int) -> Place:
        """Return the place for group `index`, by the index, the seed and the observed groups."""
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
        """Return the state for a checkpoint, as rows, because a JSON key cannot be a pair."""
        return {"variances": [[*place, variance] for place, variance in self._variances.items()]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`. In a new run the argument is {}."""
        rows = state.get("variances", [])
        self._variances = {(pool, position): variance for pool, position, variance in rows}

    def metrics(self) -> dict[str, float]:
        """Return the metric that each step logs as order/mean_variance."""
        known = self._variances.values()
        return {"mean_variance": sum(known) / len(known) if known else 0.0}
