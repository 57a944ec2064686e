"""What each rollout of a group is worth: truncation, then shaping, then the advantage. No torch.

    rollouts -> truncation -> length penalty -> advantage -> Credit (reward, advantages, trains)

A reward is earned by turns. What the environment gave by turn stays where it was given; all else,
what was given for the episode as a whole and what truncation and shaping changed, is earned by the
last turn. Most advantages look at the whole; those marked PER_TURN look at every turn, and each
token gets its turn's number.

The environment's own reward stays in the rollout and in the metrics: runs whose shaping differs can
still be compared by it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from envs.episode import Example
from rl.records import Advantage, Credit, Rollout, TurnAdvantage
from rl.rollouts.truncation import Standing
from rl.run.failure import RunFailed

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
class _Earned:
    """A reward of one rollout."""

    whole: float
    by_turn: tuple[float, ...]


@dataclass(frozen=True)
class Crediting:
    """Judges whole groups.

    Attributes:
        weights_of: an example's reward weights.
        per_turn: whether the advantage is one that looks at every turn.

    """

    truncation: Truncation
    shaping: RewardShaping
    advantage: Advantage | TurnAdvantage
    weights_of: Callable[[Example], Mapping[str, float]]
    per_turn: bool = False

    def __call__(self, example: Example, rollouts: Sequence[Rollout]) -> tuple[Credit, ...]:
        """Return one credit per rollout of the group that played `example`."""
        weights = self.weights_of(example)
        standings = [self._shaped(rollout) for rollout in rollouts]
        rewards = [
            None if standing.reward is None else _earned(rollout, standing.reward, weights)
            for rollout, standing in zip(rollouts, standings, strict=True)
        ]
        if self.shaping.normalise_each:
            advantages = self._one_by_one(weights, rollouts, standings)
        else:
            advantages = self._compared(rewards)
        return tuple(
            Credit(standing.reward, numbers, standing.trains, earned.by_turn if earned else ())
            for standing, numbers, earned in zip(standings, advantages, rewards, strict=True)
        )

    def _compared(self, rewards: Sequence[_Earned | None]) -> list[tuple[float, ...]]:
        """The advantages of one reward: of each rollout one number, or one a turn."""
        if not self.per_turn:
            advantage = cast("Advantage", self.advantage)
            return [(number,) for number in advantage([e and e.whole for e in rewards])]
        advantages = cast("TurnAdvantage", self.advantage)([e and e.by_turn for e in rewards])
        for earned, numbers in zip(rewards, advantages, strict=True):
            if earned and len(numbers) != len(earned.by_turn):
                raise RunFailed(
                    f"the advantage returned {len(numbers)} numbers for a rollout of "
                    f"{len(earned.by_turn)} turns: return one for each turn of each rollout"
                )
        pairs = zip(rewards, advantages, strict=True)
        return [tuple(numbers) if earned else (0.0,) for earned, numbers in pairs]

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
    ) -> list[tuple[float, ...]]:
        """The weighted sum of each named reward's own advantages.

        What truncation and shaping changed is one more reward, with weight 1.
        """
        scorable = [standing.reward is not None for standing in standings]
        # What an unscorable one was given may be NaN or infinite, and is no sum of anything.
        columns = [
            (
                weight,
                [
                    _earned(r, r.rewards.get(name, 0.0), {name: 1.0}) if ok else None
                    for r, ok in zip(rollouts, scorable, strict=True)
                ],
            )
            for name, weight in weights.items()
            if weight  # 0 x NaN is NaN
        ]
        changes = [
            None
            if standing.reward is None
            else _earned(rollout, standing.reward - (rollout.reward or 0.0), {})
            for standing, rollout in zip(standings, rollouts, strict=True)
        ]
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


def _num_turns(rollout: Rollout) -> int:
    """Turns of a rollout; at least one, for what is earned must be earned somewhere."""
    # Not `turns` alone, which an environment might have changed: every token's turn must count.
    return max(1, rollout.turns, len(rollout.turn_lengths))


def _earned(rollout: Rollout, whole: float, weights: Mapping[str, float]) -> _Earned:
    """Say which turns earned `whole`: what these rewards gave by turn; the last one, the rest."""
    by_turn = [0.0] * _num_turns(rollout)
    for name, weight in weights.items():
        for turn, value in enumerate(rollout.turn_rewards.get(name, ()) if weight else ()):
            by_turn[turn] += weight * value
    by_turn[-1] += whole - math.fsum(by_turn)
    return _Earned(whole, tuple(by_turn))
