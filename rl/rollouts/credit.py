"""What each rollout of a group is worth: truncation, then shaping, then the advantage. No torch.

    rollouts -> truncation -> length penalty -> advantage -> Credit (reward, advantage, trains)

The environment's own reward stays in the rollout and in the metrics: runs whose shaping differs can
still be compared by it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from envs.episode import Example
from rl.records import Advantage, Credit, Rollout
from rl.rollouts.truncation import Standing

Truncation = Callable[[Rollout], Standing]


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """conf/reward: what is done to rewards before the advantage.

    Attributes:
        normalise_each: False: the weighted sum of the named rewards, then one advantage of it.
            True: an advantage of each named reward, then their weighted sum, so that a reward with
            a small spread counts as much as one with a large spread. GDPO, arXiv:2601.05242.
        length_penalty: reward lost per completion token.

    """

    normalise_each: bool
    length_penalty: float


@dataclass(frozen=True)
class Crediting:
    """Judges whole groups.

    Attributes:
        weights_of: an example's reward weights; read only where each reward is normalised.

    """

    truncation: Truncation
    shaping: RewardShaping
    advantage: Advantage
    weights_of: Callable[[Example], Mapping[str, float]]

    def __call__(self, example: Example, rollouts: Sequence[Rollout]) -> tuple[Credit, ...]:
        """Return one credit per rollout of the group that played `example`."""
        standings = [self._shaped(rollout) for rollout in rollouts]
        rewards = [standing.reward for standing in standings]
        if self.shaping.normalise_each:
            advantages = self._one_by_one(self.weights_of(example), rollouts, standings)
        else:
            advantages = self.advantage(rewards)
        return tuple(
            Credit(standing.reward, advantage, standing.trains)
            for standing, advantage in zip(standings, advantages, strict=True)
        )

    def _shaped(self, rollout: Rollout) -> Standing:
        standing = self.truncation(rollout)
        if standing.reward is None or not self.shaping.length_penalty:
            return standing
        # After truncation: a reward that it set to 0 pays for its length like any other.
        lost = self.shaping.length_penalty * rollout.num_completion
        return replace(standing, reward=standing.reward - lost)

    def _one_by_one(
        self,
        weights: Mapping[str, float],
        rollouts: Sequence[Rollout],
        standings: Sequence[Standing],
    ) -> list[float]:
        """The weighted sum of each named reward's own advantages.

        What truncation and shaping changed is one more reward, with weight 1.
        """
        scorable = [standing.reward is not None for standing in standings]
        total = [0.0] * len(rollouts)
        columns = [
            (weight, [rollout.rewards.get(name, 0.0) for rollout in rollouts])
            for name, weight in weights.items()
            if weight  # 0 x NaN is NaN
        ]
        changes = [
            (standing.reward or 0.0) - (rollout.reward or 0.0)
            for standing, rollout in zip(standings, rollouts, strict=True)
        ]
        for weight, column in [*columns, (1.0, changes)]:
            known = [v if ok else None for v, ok in zip(column, scorable, strict=True)]
            advantages = self.advantage(known)
            total = [t + weight * a for t, a in zip(total, advantages, strict=True)]
        return total
