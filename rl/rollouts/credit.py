"""Computes the credit of each rollout of a group: truncation, shaping, advantage. No torch.

    rollouts -> truncation -> length penalty -> turns -> advantage -> Credit

Rewards are split by turn. A reward that the environment gave for a turn belongs to that turn.
Everything else belongs to the last turn: a reward for the whole episode, and what truncation and
shaping changed. Most advantages read the rewards of whole episodes. An advantage that takes
turns reads the rewards by turn, and each token gets the number of its turn.

The environment's own reward stays in the rollout and in the metrics, so that runs with different
shaping can be compared.
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
    """conf/reward: how rewards change before the advantage.

    Attributes:
        normalise_each: False: the weighted sum of the named rewards, then one advantage of it.
            True: an advantage of each named reward, then their weighted sum, so that a reward with
            a small spread counts as much as one with a large spread. GDPO, arXiv:2601.05242.
        length_penalty: reward lost per completion token.

    """

    normalise_each: bool
    length_penalty: NonNegativeFloat


@dataclass(frozen=True)
class Crediting:
    """Computes the credits of whole groups.

    Attributes:
        weights_of: an example's reward weights.
        per_turn: whether the advantage reads the rewards by turn.

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
            advantages = self._one_by_one(weights, rollouts, credits)
        else:
            advantages = self._compared(credits)
        pairs = zip(credits, advantages, strict=True)
        return tuple(replace(credit, advantages=numbers) for credit, numbers in pairs)

    def _shaped(self, rollout: Rollout, weights: Mapping[str, float]) -> Credit:
        credit = self.truncation(rollout)
        if credit.reward is not None and self.shaping.length_penalty:
            # After truncation, so that a reward which truncation set to 0 also pays for its length.
            lost = self.shaping.length_penalty * rollout.num_completion
            credit = replace(credit, reward=credit.reward - lost)
        return replace(credit, turn_rewards=_by_turn(rollout, credit.reward, weights))

    def _compared(self, credits: Sequence[Credit]) -> list[tuple[float, ...]]:
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

    def _one_by_one(
        self, weights: Mapping[str, float], rollouts: Sequence[Rollout], credits: Sequence[Credit]
    ) -> list[tuple[float, ...]]:
        """Return the weighted sum of each named reward's own advantages.

        What truncation and shaping changed counts as one more reward, with weight 1.
        """
        pairs = list(zip(rollouts, credits, strict=True))
        # The rewards of an unscorable rollout may be NaN or infinite, so they are not read.
        columns = [
            (weight, [_alone(r, c, r.rewards.get(name, 0.0), {name: 1.0}) for r, c in pairs])
            for name, weight in weights.items()
            if weight  # because 0 x NaN is NaN
        ]
        changes = [_alone(r, c, (c.reward or 0.0) - (r.reward or 0.0), {}) for r, c in pairs]
        totals: list[tuple[float, ...]] = []
        for weight, column in [*columns, (1.0, changes)]:
            shares = [tuple(weight * a for a in numbers) for numbers in self._compared(column)]
            totals = [
                tuple(t + s for t, s in zip(total, share, strict=True))
                for total, share in zip(
                    totals or [(0.0,) * len(s) for s in shares], shares, strict=True
                )
            ]
        return totals


def _alone(rollout: Rollout, credit: Credit, reward: float, weights: Mapping[str, float]) -> Credit:
    """Return the credit of one reward by itself."""
    own = None if credit.reward is None else reward
    return Credit(own, turn_rewards=_by_turn(rollout, own, weights))


def _by_turn(
    rollout: Rollout, reward: float | None, weights: Mapping[str, float]
) -> tuple[float, ...]:
    """Return what each turn earned: the weighted rewards given by turn; the last turn, the rest."""
    if reward is None:
        return ()
    # At least one turn. Not `turns` alone, because an environment may have changed that number.
    by_turn = [0.0] * max(1, rollout.turns, len(rollout.turn_lengths))
    for name, weight in weights.items():
        for turn, value in enumerate(rollout.turn_rewards.get(name, ()) if weight else ()):
            by_turn[turn] += weight * value
    by_turn[-1] += reward - math.fsum(by_turn)
    return tuple(by_turn)
