"""Computes the credit of each rollout of a group: truncation, shaping, advantage. No torch.

    rollouts -> truncation -> length penalty -> turns -> advantage -> Credit

With normalise_each the penalties follow the advantages, because a normalisation would remove their
size:

    A_i = sum of weight_k * advantage(reward k)_i - (P_i - mean of P over the group)

P_i is what truncation=penalty and the length penalty subtract from the reward.

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
from rl.config.build import build
from rl.config.learned import Learned
from rl.config.ranges import NonNegativeFloat
from rl.config.schema import Run
from rl.records import Advantage, Credit, Group, Rollout, TurnAdvantage
from rl.runtime.failure import RunFailed

Truncation = Callable[[Rollout], Credit]


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """The reward shaping of conf/reward, which changes rewards before the advantage.

    Attributes:
        normalise_each: whether to compute an advantage of each named reward, then the weighted sum
            (GDPO, arXiv:2601.05242, without its normalisation over the batch), so that rewards with
            small and large spreads count equally. If not, compute one advantage of the weighted sum
            of the named rewards.
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
        compares: whether the advantage subtracts a baseline of the group.
        needs_score: whether a rollout without a score does not train, because the loss reads
            advantages.
    """

    truncation: Truncation
    shaping: RewardShaping
    advantage: Advantage | TurnAdvantage
    weights_of: Callable[[Example], Mapping[str, float]]
    per_turn: bool = False
    compares: bool = True
    needs_score: bool = True

    @staticmethod
    def of(run: Run, weights_of: Callable[[Example], Mapping[str, float]]) -> "GroupCredit":
        """Build the components of a run that make credits."""
        learned = Learned.of(run)
        return GroupCredit(
            build(run.truncation),
            build(run.reward)(),
            build(run.advantage),
            weights_of,
            per_turn=learned.advantage_takes_turns,
            compares=learned.advantage_compares,
            needs_score=learned.reads_advantages,
        )

    def __call__(self, example: Example, rollouts: Sequence[Rollout]) -> tuple[Credit, ...]:
        """Return one credit per rollout of the group that played `example`."""
        weights = self.weights_of(example)
        credits = [self._shaped(rollout, weights) for rollout in rollouts]
        if self.shaping.normalise_each:
            credits = self._normalised_each(weights, rollouts, credits)
        else:
            pairs = zip(credits, self._advantages_of(credits), strict=True)
            credits = [replace(credit, advantages=numbers) for credit, numbers in pairs]
        if not self.compares:
            credits = [replace(credit, compared=()) for credit in credits]
        return tuple(credits)

    def _shaped(self, rollout: Rollout, weights: Mapping[str, float]) -> Credit:
        credit = self.truncation(rollout)
        if credit.reward is None and self.needs_score:
            credit = replace(credit, trains=False)
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
    ) -> list[Credit]:
        """Add the weighted sum of the separate advantages of all named rewards, minus penalties."""
        pairs = list(zip(rollouts, credits, strict=True))
        columns = {
            name: [_named_credit(rollout, credit, name) for rollout, credit in pairs]
            for name, weight in weights.items()
            if weight  # skip weight 0, because 0 x NaN is NaN
        }
        advantages = [
            [tuple(weights[name] * a for a in numbers) for numbers in self._advantages_of(column)]
            for name, column in columns.items()
        ] or [[(0.0,)] * len(pairs)]
        lost = [
            (0.0 if c.is_zeroed else r.reward or 0.0) - c.reward if c.reward is not None else None
            for r, c in pairs
        ]
        known = [each for each in lost if each is not None]
        mean = math.fsum(known) / len(known) if known and self.compares else 0.0
        credited = []
        for i, (credit, penalty) in enumerate(zip(credits, lost, strict=True)):
            shares = zip(*(rows[i] for rows in advantages), strict=True)
            relative = 0.0 if penalty is None else penalty - mean
            named = [weights[name] * (column[i].reward or 0.0) for name, column in columns.items()]
            credited.append(
                replace(
                    credit,
                    advantages=tuple(math.fsum(share) - relative for share in shares),
                    compared=None if self.per_turn else (*named, -(penalty or 0.0)),
                )
            )
        return credited


def compared_columns(group: Group) -> list[list[float]] | None:
    """Return the numbers that the advantage compared, one list per reward or turn.

    Rollouts without a score are left out. None: the advantage compared nothing.
    """
    credits = [credit for credit in group.credits if credit.reward is not None]
    by_turn = any(len(credit.advantages) > 1 for credit in credits)
    rows = [
        c.compared if c.compared is not None else c.advantages if by_turn else (c.reward or 0.0,)
        for c in credits
    ]
    if rows and not any(rows):
        return None
    most = max(map(len, rows), default=1)
    return [[row[i] for row in rows if i < len(row)] for i in range(most)]


def _named_credit(rollout: Rollout, credit: Credit, name: str) -> Credit:
    """Return a credit with only this reward; unscorable rollouts stay unscorable."""
    # The rewards of an unscorable rollout are not read, because they may be NaN or infinite.
    kept = {} if credit.is_zeroed or credit.reward is None else {name: 1.0}
    own = None if credit.reward is None else rollout.rewards.get(name, 0.0) if kept else 0.0
    return Credit(own, turn_rewards=_by_turn(rollout, own, kept))


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
