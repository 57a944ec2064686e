"""Make groups of rollouts with several turns and rows."""

from dataclasses import replace

import numpy as np

from envs.episode import Example, StopReason
from rl.records import Credit, Group, Rollout, TrainingRow
from tests.support.rollouts import row


def forked_groups(seed: int = 0, *, num_groups: int = 4) -> list[Group]:
    """Return groups of three; in the first the second has no score, the third does not train."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(num_groups):
        pairs = [_rollout(rng, index, member) for member in range(3)]
        rollouts, credits = zip(*pairs, strict=True)
        groups.append(Group(index, Example(index, "none", []), 0, rollouts, credits))
    return groups


def _rollout(rng: np.random.Generator, index: int, member: int) -> tuple[Rollout, Credit]:
    rows, turn = [], 0
    for _ in range(rng.integers(1, 4)):
        num_turns = int(rng.integers(1, 3))
        rows.append(_row(rng, turn, num_turns))
        turn += num_turns
    # Rewards are float32 as in a batch, and large, so that rounding of the weights is small.
    earned = tuple((20 * rng.standard_normal(turn)).astype(np.float32).tolist())
    reward = None if (index, member) == (0, 1) else sum(earned)
    trains = (index, member) != (0, 2)
    rollout = Rollout(tuple(rows), [], reward, {}, StopReason.STOP, turn, 0.0)
    # The critic must ignore these advantages. Some are 0, which moves their rows in the plan.
    advantages = (float(rng.integers(0, 2)),)
    return rollout, Credit(reward, advantages, trains, earned if reward is not None else ())


def _row(rng: np.random.Generator, first_turn: int, num_turns: int) -> TrainingRow:
    turns = [-1] * int(rng.integers(2, 6))  # the prompt; replies stand between turns
    for turn in range(first_turn, first_turn + num_turns):
        turns += [turn] * int(rng.integers(1, 6)) + [-1] * int(rng.integers(1, 3))
    made = row(*turns)
    return replace(
        made,
        token_ids=rng.integers(0, 256, len(turns)).astype(np.int32),
        rollout_logprobs=-made.completion_mask.astype(np.float32),
    )
