"""Make rows, rollouts, groups and their credits by hand, and begin an example order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envs.episode import Example, StopReason
from envs.protocol import Pool
from losses.advantages import group_mean
from rl.records import Credit, Group, Rollout, TrainingRow
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.example_order import ExampleOrder
from rl.rollouts.truncation import keep

EXAMPLE = Example(0, "e", [])


def row(*turns: int, version: int = 0) -> TrainingRow:
    """Return a row whose tokens belong to these turns; -1: a token that was not sampled."""
    numbers = np.array(turns, np.int32)
    chosen, zeros = numbers >= 0, np.zeros(len(turns), np.float32)
    versions = np.where(chosen, version, -1).astype(np.int32)
    return TrainingRow(numbers + 10, chosen, zeros, versions, numbers)


def rollout(
    reward: float | None,
    *rows: TrainingRow,
    lengths: Sequence[int] = (1,),
    stop: StopReason = StopReason.STOP,
    fields: Mapping[str, Any] | None = None,
    **rewards: float,
) -> Rollout:
    """Return a rollout with these rows, or with a row of so many tokens for each turn."""
    rows = rows or tuple(row(-1, *[turn] * n) for turn, n in enumerate(lengths))
    turns = max((int(each.turns.max()) + 1 for each in rows), default=0)
    plain = {"turns": turns, "generation_time": 0.0}
    return Rollout(rows, [], reward, rewards, stop, **(plain | dict(fields or {})))


def group(
    rollouts: Sequence[Rollout], credits: Sequence[Credit], index: int = 0, version: int = 0
) -> Group:
    return Group(index, Example(index, "e", []), version, tuple(rollouts), tuple(credits))


def graded(
    rewards: Sequence[float | None],
    advantages: Sequence[float] | None = None,
    index: int = 0,
    version: int = 0,
) -> Group:
    """Return a group of rollouts of one token with these rewards and advantages (by default 0)."""
    rollouts = [rollout(reward, row(-1, 0, version=version)) for reward in rewards]
    pairs = zip(rewards, advantages or [0.0] * len(rewards), strict=True)
    return group(rollouts, [Credit(reward, (number,)) for reward, number in pairs], index, version)


def group_credit(
    advantage: Callable[..., Any] = group_mean,
    *,
    cut: Callable[[Rollout], Credit] = keep,
    shaping: RewardShaping | None = None,
    normalise_each: bool = False,
    length_penalty: float = 0.0,
    weights: Mapping[str, float] | None = None,
    **options: bool,
) -> GroupCredit:
    """Return the credit of a run, by default without truncation and shaping."""
    plain = RewardShaping(normalise_each=normalise_each, length_penalty=length_penalty)
    return GroupCredit(cut, shaping or plain, advantage, lambda _: weights or {}, **options)


def begun(order: ExampleOrder, pools: Sequence[Pool], seed: int) -> ExampleOrder:
    """Begin the order and return it."""
    order.begin(pools, seed)
    return order
