"""Compute the credit of each rollout of a group: truncation, length penalty, advantage.

    rollouts -> truncation -> length penalty -> split by turn -> advantage -> Credit

With reward.normalise_each, penalties are subtracted from the advantages, not from the rewards,
because an advantage that divides by the standard deviation would change the size of a penalty:

    A_i = sum over k of weight_k * advantage(reward k)_i - (P_i - mean of P over the group)

A_i: advantage of rollout i, k: named reward, P_i: amount that truncation and the length penalty
subtract from its reward. The mean of P is left out if the advantage compares no rollouts.

Rewards are split by turn. A reward that the environment returned for a turn belongs to that turn.
The last turn also gets the rewards for the whole episode and the changes by truncation and length
penalty. An advantage function reads rewards per rollout and per turn (losses/groups.py). It returns
one number per rollout, turn or token. All tokens of a rollout or a turn get its number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from envs.episode import Example
from envs.stateful import Stateful
from losses.groups import SPREAD_TOLERANCE, ScoredGroup
from rl.config.build import build, component
from rl.config.learned import Learned
from rl.config.ranges import NonNegativeFloat
from rl.config.schema import Run
from rl.records import Credit, Rollout
from rl.rollouts.compared import roles_of
from rl.runtime.failure import RunFailed
from rl.runtime.metrics import finite_float

Truncation = Callable[[Rollout], Credit]
Advantage = Callable[[ScoredGroup], Sequence[Any]]
"""group -> one number per rollout, or a sequence of numbers per turn or token of each rollout"""


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """The reward shaping of conf/reward. A subclass may override `penalties`."""

    normalise_each: bool
    length_penalty: NonNegativeFloat

    def penalties(self, group: ScoredGroup) -> Sequence[float]:
        """Return for each rollout the number that is subtracted from its reward."""
        return [self.length_penalty * length for length in group.lengths]


@dataclass(frozen=True)
class GroupCredit(Stateful):
    """Callable that returns the credit of each rollout of a group."""

    truncation: Truncation
    shaping: RewardShaping
    advantage: Advantage
    weights_of: Callable[[Example], Mapping[str, float]]  # example -> {reward name: weight}
    per_turn: bool = False  # whether the advantage returns one number per turn
    compares: bool = True  # whether an advantage depends on the group's other rollouts
    needs_score: bool = True  # whether the loss reads advantages; then only scored rollouts train
    per_token: bool = False  # whether the advantage returns one number per completion token

    @staticmethod
    def of(run: Run, weights_of: Callable[[Example], Mapping[str, float]]) -> "GroupCredit":
        learned = Learned.of(run)
        return GroupCredit(
            build(run.truncation),
            build(run.reward)(),
            component(run.advantage),
            weights_of,
            per_turn=learned.advantage_by_turn,
            compares=learned.advantage_compares,
            needs_score=learned.reads_advantages,
            per_token=learned.advantage_by_token,
        )

    def state(self) -> dict[str, Any]:
        return getattr(self.advantage, "state", dict[str, Any])()

    def load(self, state: dict[str, Any]) -> None:
        cast("Any", self.advantage).load(state)

    def __call__(self, example: Example, rollouts: Sequence[Rollout]) -> tuple[Credit, ...]:
        """Return one credit per rollout. Only rollouts of the same role are compared."""
        credits = {
            role: iter(self._credits_of_role(example, [r for r in rollouts if r.role == role]))
            for role in roles_of(rollouts)
        }
        return tuple(next(credits[rollout.role]) for rollout in rollouts)

    def _credits_of_role(self, example: Example, rollouts: Sequence[Rollout]) -> list[Credit]:
        weights = self.weights_of(example)
        credits = [self._truncate(rollout) for rollout in rollouts]
        group = scored_group(example, rollouts, credits, weights)
        penalties = self.shaping.penalties(group)
        _require_length(penalties, len(rollouts), "`penalties` of the reward shaping", "rollout")
        # Truncation comes first, so that penalties also lower a reward that truncation set to 0.
        credits = [
            c if c.reward is None else replace(c, reward=c.reward - float(penalty))
            for c, penalty in zip(credits, penalties, strict=True)
        ]
        group = scored_group(example, rollouts, credits, weights)
        pairs = zip(credits, group.turn_rewards, strict=True)
        credits = [replace(credit, turn_rewards=tuple(turns or ())) for credit, turns in pairs]
        if self.shaping.normalise_each:
            credits = self._normalise_each(weights, group, credits)
        else:
            pairs = zip(credits, self._advantages_of(group), strict=True)
            credits = [replace(credit, advantages=numbers) for credit, numbers in pairs]
        return self._set_compared(credits)

    def _truncate(self, rollout: Rollout) -> Credit:
        credit = self.truncation(rollout)
        trains = credit.trains and not (
            credit.reward is None and (self.needs_score or rollout.role)
        )
        return replace(credit, trains=trains, by_token=self.per_token)

    def _advantages_of(self, group: ScoredGroup) -> list[tuple[float, ...]]:
        advantages = self.advantage(group)
        _require_length(advantages, len(group.rewards), "the advantage", "rollout")
        if not self.per_turn and not self.per_token:
            return [(float(number),) for number in advantages]
        unit = "turn" if self.per_turn else "token"
        counts = group.lengths if self.per_token else [len(t or ()) for t in group.turn_rewards]
        checked = []
        for numbers, count, reward in zip(advantages, counts, group.rewards, strict=True):
            if reward is not None:
                _require_length(numbers, count, "the advantage", unit, "rollout")
            checked.append((0.0,) if reward is None else tuple(map(float, numbers)))
        return checked

    def _normalise_each(
        self, weights: Mapping[str, float], group: ScoredGroup, credits: Sequence[Credit]
    ) -> list[Credit]:
        # A reward with weight 0 is only a metric.
        columns = {name: _select_reward(group, name) for name, w in weights.items() if w}
        advantages = [
            [tuple(weights[name] * a for a in numbers) for numbers in self._advantages_of(column)]
            for name, column in columns.items()
        ] or [[(0.0,)] * len(credits)]
        penalties = [  # P_i, or None without a reward
            None
            if credit.reward is None
            else (0.0 if credit.is_zeroed else finite_float(rollout.reward) or 0.0) - credit.reward
            for rollout, credit in zip(group.rollouts, credits, strict=True)
        ]
        scored = [penalty for penalty in penalties if penalty is not None]
        mean = math.fsum(scored) / len(scored) if scored and self.compares else 0.0
        credited = []
        for i, (credit, penalty) in enumerate(zip(credits, penalties, strict=True)):
            shares = zip(*(rows[i] for rows in advantages), strict=True)
            subtracted = 0.0 if penalty is None else penalty - mean
            named = [weights[name] * (column.rewards[i] or 0.0) for name, column in columns.items()]
            credited.append(
                replace(
                    credit,
                    advantages=tuple(math.fsum(share) - subtracted for share in shares),
                    compared=None if self.per_turn else (*named, -(penalty or 0.0)),
                )
            )
        return credited

    def _set_compared(self, credits: Sequence[Credit]) -> list[Credit]:
        """Return the credits with `compared`: the numbers that the advantage compares in the group.

        `compared` is () if the advantage compares nothing. With normalise_each, it is already set.
        None stands for the rewards, or for the advantages per turn. If equal rewards get advantages
        other than 0, or different rewards all get 0, the advantage compares something else, such as
        lengths. Then, and for advantages per token, `compared` is (smallest, largest) advantage.
        """
        if not self.compares:
            return [replace(credit, compared=()) for credit in credits]
        if self.per_turn or self.shaping.normalise_each:
            return [*credits]
        rewards = [credit.reward for credit in credits if credit.reward is not None]
        is_flat = not rewards or max(rewards) - min(rewards) <= SPREAD_TOLERANCE
        is_zero = not any(any(credit.advantages) for credit in credits)
        if is_flat == is_zero and not self.per_token:
            return [*credits]
        return [
            replace(c, compared=(min(c.advantages, default=0.0), max(c.advantages, default=0.0)))
            for c in credits
        ]


def _require_length(numbers: Any, count: int, what: str, unit: str, owner: str = "group") -> None:
    if len(numbers) != count:
        raise RunFailed(
            f"{what} returned {len(numbers)} numbers for a {owner} of {count} {unit}s: return one "
            f"for each {unit}{' of each rollout' if owner == 'rollout' else ''}"
        )


def scored_group(
    example: Example,
    rollouts: Sequence[Rollout],
    credits: Sequence[Credit],
    weights: Mapping[str, float],
) -> ScoredGroup:
    """Return the input of advantage functions and of `penalties`, with the rewards of `credits`."""
    pairs = list(zip(rollouts, credits, strict=True))
    return ScoredGroup(
        rewards=[credit.reward for credit in credits],
        turn_rewards=[_split_by_turn(rollout, credit.reward, weights) for rollout, credit in pairs],
        named_rewards=[
            dict.fromkeys(rollout.rewards, 0.0) if credit.is_zeroed else rollout.rewards
            for rollout, credit in pairs
        ],
        lengths=[rollout.num_completion for rollout in rollouts],
        rollouts=rollouts,
        example=example,
    )


def _select_reward(group: ScoredGroup, name: str) -> ScoredGroup:
    # A missing, NaN or infinite named reward counts as 0. It makes the reward of its rollout None,
    # but a truncation function may have replaced this None by a number.
    rewards = [
        None if reward is None else finite_float(named.get(name)) or 0.0
        for reward, named in zip(group.rewards, group.named_rewards, strict=True)
    ]
    turns = [
        # If `named` is not the rollout's own, truncation set its rewards to 0, in each turn.
        _split_by_turn(rollout, reward, {name: 1.0} if named is rollout.rewards else {})
        for rollout, reward, named in zip(group.rollouts, rewards, group.named_rewards, strict=True)
    ]
    return replace(group, rewards=rewards, turn_rewards=turns)


def _split_by_turn(
    rollout: Rollout, reward: float | None, weights: Mapping[str, float]
) -> tuple[float, ...] | None:
    """Return the rewards of the turns. The last turn also gets `reward` minus their sum."""
    if reward is None:
        return None
    # Take the larger count, because an environment may have changed `rollout.turns`.
    by_turn = [0.0] * max(1, rollout.turns, len(rollout.turn_lengths))
    for name, weight in weights.items():
        for turn, value in enumerate(rollout.turn_rewards.get(name, ()) if weight else ()):
            by_turn[turn] += weight * (finite_float(value) or 0.0)
    by_turn[-1] += reward - math.fsum(by_turn)
    return tuple(by_turn)
