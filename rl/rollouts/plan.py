"""Split one global batch into micro-batches for every rank.

This module computes the token weights over the whole batch, before the split. The objective is the
sum of weight times loss over all micro-batches and ranks, so neither its value nor its gradient
depends on the split. Every rank gets the same number of micro-batches, because the collective
operations of a micro-batch need all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rl.records import (
    Floats,
    Group,
    Ints,
    MicroBatch,
    PlannedColumns,
    RankBatch,
    TrainingRow,
    columns_of,
)
from rl.rollouts.compared import compared_ids
from rl.rollouts.packing import pack, pack_groups, split_by_advantage

Aggregation = Callable[[Any, Sequence[int]], Sequence[Any]]
"""Function from (completion lengths, group ids) of the trained rollouts to their token weights.

An aggregation by turn gets the lengths of each rollout's turns and returns one weight per turn
(losses/aggregation.py).
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightedRow(TrainingRow, PlannedColumns):
    """A training row with advantages and weights of its tokens, and its position in the batch."""

    rollout_id: int  # position of the row's rollout in the batch
    group_id: int = 0  # equal for all rows of one group and role (`compared_ids`)
    first_position: int = 0  # number of completion tokens in earlier rows of the rollout
    number: int = 0  # position of the row among the rows of its rollout
    env: str = ""  # name of the environment that the rollout played

    @property
    def has_advantage(self) -> bool:
        return bool(np.any(self.advantages))


def weighted_row(
    row: TrainingRow,
    advantages: Sequence[float] | Floats,
    token_weights: Sequence[float],
    source: int = 0,
    **origin: Any,
) -> WeightedRow:
    """Return the row with an advantage and a weight for each token.

    `advantages` and `token_weights` have one number for the whole row, or one per turn of the
    rollout. `advantages` may also be an array with one number per completion token of the row.
    `origin`: `rollout_id` and other fields that WeightedRow adds to TrainingRow.
    """
    return WeightedRow(
        **vars(row),
        advantages=_per_token(row, advantages),
        token_weights=_per_token(row, token_weights),
        source=np.full(row.length, source, np.int8),
        **origin,
    )


def _per_token(row: TrainingRow, numbers: Sequence[float] | Floats) -> Floats:
    """Return one value per token. `numbers`: a single one, or one per turn or completion token.

    A single number applies to all tokens. Otherwise tokens outside completions get 0.
    """
    if isinstance(numbers, np.ndarray):
        values = np.zeros(len(row.token_ids), np.float32)
        values[row.completion_mask] = numbers
        return values
    values = np.full(len(row.token_ids), numbers[0] if len(numbers) == 1 else 0.0, np.float32)
    if len(numbers) > 1:
        values[row.completion_mask] = np.array(numbers)[row.turns[row.completion_mask]]
    return values


def weighted_rows(
    groups: Sequence[Group], aggregation: Aggregation, *, per_turn: bool = False
) -> list[WeightedRow]:
    """Return the batch's rows that are trained, with advantages and token weights.

    The aggregation computes a weight for each rollout (each turn if `per_turn`) from its number of
    completion tokens in all rows. Each of these tokens gets this weight.
    """
    everything = [
        (group, rollout, credit)
        for group in groups
        for rollout, credit in zip(group.rollouts, group.credits, strict=True)
    ]
    group_ids = compared_ids(groups)
    training = [i for i, (_, _, credit) in enumerate(everything) if credit.trains]
    turns = [everything[i][1].turn_lengths for i in training]
    lengths = turns if per_turn else [sum(numbers) for numbers in turns]
    weights = aggregation(lengths, [group_ids[i] for i in training])
    rows = []
    for i, weight in zip(training, weights, strict=True):
        group, rollout, credit = everything[i]
        token_weights, num_before = weight if per_turn else (weight,), 0
        for number, row in enumerate(rollout.rows):
            origin: dict[str, Any] = {"rollout_id": i, "group_id": group_ids[i], "number": number}
            origin |= {"first_position": num_before, "env": group.example.env}
            advantages, num_after = credit.advantages, num_before + row.num_completion
            if credit.by_token and len(advantages) > 1:
                advantages = np.array(advantages[num_before:num_after], np.float32)
            rows.append(weighted_row(row, advantages, token_weights, rollout.source, **origin))
            num_before = num_after
    return rows


def plan_batch(
    groups: Sequence[Group], aggregation: Aggregation, *, per_turn: bool = False, **settings: Any
) -> list[RankBatch]:
    """Return one `RankBatch` per rank for these groups, with the rewards of all rollouts.

    `per_turn`: whether the aggregation returns one weight per turn, and not one per rollout.
    `settings`: the keyword arguments of `plan`.
    """
    batches = plan(weighted_rows(groups, aggregation, per_turn=per_turn), **settings)
    return [replace(batch, **rollout_fields(groups)) for batch in batches]


def rollout_fields(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the fields of `RankBatch` that have one entry per rollout of the whole batch."""
    credits = [credit for group in groups for credit in group.credits]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    max_turns = max([1, *(len(credit.turn_rewards) for credit in credits)])
    turn_rewards = np.full((len(credits), max_turns), np.nan, np.float32)
    for values, credit in zip(turn_rewards, credits, strict=True):
        values[: len(credit.turn_rewards)] = credit.turn_rewards
    rewards = [np.nan if credit.reward is None else credit.reward for credit in credits]
    lengths = [
        sum(rollout.turn_lengths) if credit.trains else 0
        for rollout, credit in zip(rollouts, credits, strict=True)
    ]
    return {
        "versions": np.array([group.version for group in groups for _ in group.rollouts], np.int32),
        "rewards": np.array(rewards, np.float32),
        "group_ids": np.array(compared_ids(groups), np.int32),
        "turn_rewards": turn_rewards,
        "lengths": np.array(lengths, np.int32),
    }


def plan(
    rows: Sequence[WeightedRow],
    *,
    step: int,
    ranks: int,
    tokens_per_micro_batch: int,
    metrics: dict[str, float],
    shares_prefixes: bool = False,
    whole_groups: bool = False,
) -> list[RankBatch]:
    """Return one `RankBatch` per rank, with similar numbers of tokens.

    A micro-batch of several rows has at most `tokens_per_micro_batch` tokens (packing.py).
    Rows whose advantages are all 0 come last, in separate micro-batches. With most losses, these
    micro-batches have no gradient and need no backward pass (rl/learner/policy.py).

    `shares_prefixes`: whether the trainer computes a common beginning of several rows once
    (rl/rollouts/packing.py). `whole_groups`: keep all rows of a group in one micro-batch.
    """
    loads = [0] * ranks  # number of tokens assigned to each rank so far
    micro_batches: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for kind in split_by_advantage(rows, whole_groups=whole_groups):
        packing = pack_groups if whole_groups else pack
        packed = packing(kind, loads, tokens_per_micro_batch, shares_prefixes=shares_prefixes)
        for bins, stacked in zip(packed, micro_batches, strict=True):
            stacked += map(_pad, bins)
    return [
        # Without rows, each rank gets one micro-batch of masked tokens, so that the step runs.
        RankBatch(step=step, micro_batches=tuple(stacked or [_pad([])]), metrics=metrics)
        for stacked in micro_batches
    ]


def _pad(rows: Sequence[WeightedRow]) -> MicroBatch:
    """Return the rows padded on the right; without rows, one row of masked tokens."""
    # The masked row has two tokens, because the policy never predicts the first token of a row.
    shape = max(len(rows), 1), max((row.length for row in rows), default=2)
    columns = {name: np.full(shape, c.fill, c.dtype) for name, c in columns_of(MicroBatch).items()}
    for name, values in columns.items():
        for i, row in enumerate(rows):
            values[i, : row.length] = getattr(row, name)
    return MicroBatch(
        **columns,
        rollout_ids=np.array([row.rollout_id for row in rows] or [-1], np.int32),
        group_ids=np.array([row.group_id for row in rows] or [-1], np.int32),
        first_positions=np.array([row.first_position for row in rows] or [0], np.int32),
        row_numbers=np.array([row.number for row in rows] or [0], np.int32),
        envs=tuple(row.env for row in rows) or ("",),
        **_hinted_prompts(rows),
        kept=_join_kept(rows),
    )


def _join_kept(rows: Sequence[WeightedRow]) -> Ints | None:
    """Return the `kept` (rl/records.py) of all rows as one array; None if no row has a `kept`."""
    present = [row.kept for row in rows if row.kept is not None]
    if not present:
        return None
    width = max(kept.shape[1] for kept in present)
    joined = [np.full((row.num_completion, width), -1, np.int32) for row in rows]
    for row, kept in zip(rows, joined, strict=True):
        if row.kept is not None:
            kept[:, : row.kept.shape[1]] = row.kept
    return np.concatenate(joined)


def _hinted_prompts(rows: Sequence[WeightedRow]) -> dict[str, Any]:
    """Return the fields of `MicroBatch` for hinted prompts; {} if no row has a hinted prompt."""
    if all(row.hinted_prompt is None for row in rows):
        return {}
    pairs = []
    for row in rows:
        first = int(row.completion_mask.argmax())
        prompt = row.token_ids[:first] if row.hinted_prompt is None else row.hinted_prompt
        mask = np.concatenate([np.zeros(len(prompt), np.bool_), row.completion_mask[first:]])
        pairs.append((np.concatenate([prompt, row.token_ids[first:]]), mask))
    shape = len(rows), max(len(mask) for _, mask in pairs)
    token_ids, masks = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for i, (ids, mask) in enumerate(pairs):
        token_ids[i, : len(ids)], masks[i, : len(mask)] = ids, mask
    return {"hinted_token_ids": token_ids, "hinted_mask": masks}
