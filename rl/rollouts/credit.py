"""Computes the credit of each rollout of a group: truncation, shaping, advantage. No torch.

    rollouts -> truncation -> length penalty -> turns -> advantage -> Credit

Rewards are split by turn. A reward that the environment returned for a turn belongs to that turn.
Two kinds of reward belong to the last turn: rewards for the whole episode, and the changes by
truncation and shaping. Most advantages use the rewards of whole episodes. An advantage by turn uses
the rewards by turn, and each token gets the number of its turn.

The environment's unshaped reward stays in the rollout and in the metrics, so that runs with
different shaping can be compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from envs.episode import Example
from rl.config.ranges import NonNegativeFloat
from rl.records import Advantage, Credit, Rollout, TurnAdvantage
from rl.runtime.failure import RunFailed

Truncation = Callable[[Rollout], Credit]


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """The reward shaping of conf/reward, which changes rewards before the advantage.

    Attributes:
        normalise_each: whether to compute an advantage of each named reward, then the weighted sum
            (GDPO, arXiv:2601.05242), so that rewards with small and large spreads count equally.
            If not, compute one advantage of the weighted sum of the named rewards.
        length_penalty: reward subtracted per completion token.
    """

    normalise_each: bool
    length_penalty: NonNegativeFloat


@dataclass(frozen=True)
class GroupCredit:
    """Computes the credits of whole groups.

    Attributes:
        weights_of: returns the reward weights of an example.
        per_turn: whether the advantage uses the rewards by turn.
    """

    truncation: Truncation
    shaping: RewardShaping
    advantage: Advantage | TurnAdvantage
    weights_of: Callable[[Example], Mapping[str, float]]
    per_turn: bool = False

    def __call__(self, example: Example, rollouts: Sequence[Rollout]) -> tuple[Credit, ...]:
        """Return one credit per rollout of the group that played `example`."""
        weights = self.weights_of(example)
        credits = [self._shaped(rollout, weights) for rollout in rollouts]
        if self.shaping.normalise_each:
            advantages = self._normalised_each(weights, rollouts, credits)
        else:
            advantages = self._advantages_of(credits)
        pairs = zip(credits, advantages, strict=True)
        return tuple(replace(credit, advantages=numbers) for credit, numbers in pairs)

    def _shaped(self, rollout: Rollout, weights: Mapping[str, float]) -> Credit:
        credit = self.truncation(rollout)
        if credit.reward is not None and self.shaping.length_penalty:
            # The penalty follows truncation, so that it lowers even a reward that is now 0.
            lost = self.shaping.length_penalty * rollout.num_completion
            credit = replace(credit, reward=credit.reward - lost)
        return replace(credit, turn_rewards=_by_turn(rollout, credit.reward, weights))

    def _advantages_of(self, credits: Sequence[Credit]) -> list[tuple[float, ...]]:
        """Return the advantages of one reward: one number per rollout, or one per turn."""
        if not self.per_turn:
            advantage = cast("Advantage", self.advantage)
            return [(number,) for number in advantage([credit.reward for credit in credits])]
        scored = [None if credit.reward is None else credit.turn_rewards for credit in credits]
        advantages = cast("TurnAdvantage", self.advantage)(scored)
        for rewards, numbers in zip(scored, advantages, strict=True):
            if rewards is not None and len(numbers) != len(rewards):
                raise RunFailed(
                    f"the advantage returned {len(numbers)} numbers for a rollout of "
                    f"{len(rewards)} turns: return one for each turn of each rollout"
                )
        pairs = zip(scored, advantages, strict=True)
        return [(0.0,) if rewards is None else tuple(numbers) for rewards, numbers in pairs]

    def _normalised_each(
        self, weights: Mapping[str, float], rollouts: Sequence[Rollout], credits: Sequence[Credit]
    ) -> list[tuple[float, ...]]:
        """Return the weighted sum of the separate advantages of all named rewards.

        The changes by truncation and shaping count as one more reward, with weight 1.
        """
        pairs = list(zip(rollouts, credits, strict=True))
        # The rewards of an unscorable rollout are not read, because they may be NaN or infinite.
        columns = [
            (weight, [_credit_of(r, c, r.rewards.get(name, 0.0), {name: 1.0}) for r, c in pairs])
            for name, weight in weights.items()
            if weight  # skip weight 0, because 0 x NaN is NaN
        ]
        changes = [_credit_of(r, c, (c.reward or 0.0) - (r.reward or 0.0), {}) for r, c in pairs]
        totals: list[tuple[float, ...]] = []
        for weight, column in [*columns, (1.0, changes)]:
            shares = [tuple(weight * a for a in numbers) for numbers in self._advantages_of(column)]
            totals = [
                tuple(t + s for t, s in zip(total, share, strict=True))
                for total, share in zip(
                    totals or [(0.0,) * len(s) for s in shares], shares, strict=True
                )
            ]
        return totals


def _credit_of(
    rollout: Rollout, credit: Credit, reward: float, weights: Mapping[str, float]
) -> Credit:
    """Return a credit with only this reward; unscorable rollouts stay unscorable."""
    own = None if credit.reward is None else reward
    return Credit(own, turn_rewards=_by_turn(rollout, own, weights))


def _by_turn(
    rollout: Rollout, reward: float | None, weights: Mapping[str, float]
) -> tuple[float, ...]:
    """Return the reward of each turn: the weighted turn rewards, and the remainder at the last."""
    if reward is None:
        return ()
    # At least one turn. `turns` alone is not enough, because an environment may have changed it.
    by_turn = [0.0] * max(1, rollout.turns, len(rollout.turn_lengths))
    for name, weight in weights.items():
        for turn, value in enumerate(rollout.turn_rewards.get(name, ()) if weight else ()):
            by_turn[turn] += weight * value
    by_turn[-1] += reward - math.fsum(by_turn)
    return tuple(by_turn)
