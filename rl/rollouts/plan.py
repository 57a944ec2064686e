"""Splits one global batch into micro-batches for every rank.

The token weights are computed here, over the whole batch, before anything is split: the objective
is the plain sum of weight times loss over all micro-batches and ranks, so neither its value nor
its gradient can depend on the split. Every rank gets the same number of micro-batches, because
ranks meet in collectives in every one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from rl.records import Floats, Group, MicroBatch, RankBatch
from rl.records import Sequence as Row

Aggregation = Callable[[Any, Sequence[int]], Sequence[Any]]
"""(completion tokens of each rollout, its group) -> the weight of each of its tokens

One that its file marks PER_TURN gets the tokens of each turn of each rollout and returns a weight
for each of them (losses/aggregation.py).
"""


@dataclass(frozen=True, eq=False)
class WeightedRow:
    """A training row with what its tokens count."""

    row: Row
    advantages: Floats | float  # [L], or one for all of its tokens
    token_weights: Floats | float  # likewise
    rollout_id: int  # position of its rollout in the batch
    first_position: int = 0  # completion tokens of the rollout's rows before this one
    env: str = ""  # where it was played
    number: int = 0  # place of the row among its rollout's

    @property
    def length(self) -> int:
        """Tokens, prompt included."""
        return len(self.row.token_ids)

    @property
    def teaches(self) -> bool:
        """Whether one of its tokens has an advantage."""
        return bool(np.any(self.advantages))


def weigh(
    groups: Sequence[Group], aggregation: Aggregation, *, per_turn: bool = False
) -> list[WeightedRow]:
    """Return the rows of a batch that train, with advantages and token weights.

    What the aggregation weighs is the rollout, or its turn, however many rows its episode forked
    into: all of them have one weight, made from the tokens of all of them.
    """
    credited = [
        (rollout, credit, position, group.example.env)
        for position, group in enumerate(groups)
        for rollout, credit in zip(group.rollouts, group.credits, strict=True)
    ]
    training = [
        (rollout, credit.advantages, position, i, env)
        for i, (rollout, credit, position, env) in enumerate(credited)
        if credit.trains
    ]
    # Weighed over all ranks at once: nothing that follows can change what a token counts.
    turns = [rollout.turn_lengths for rollout, *_ in training]
    lengths = turns if per_turn else [sum(numbers) for numbers in turns]
    weights = aggregation(lengths, [position for _, _, position, *_ in training])
    return [
        WeightedRow(
            row,
            _by_token(row, advantages),
            _by_token(row, weight if per_turn else (weight,)),
            *(i, before, env, number),
        )
        for (rollout, advantages, _, i, env), weight in zip(training, weights, strict=True)
        for number, (before, row) in enumerate(
            zip(_tokens_before(rollout.sequences), rollout.sequences, strict=True)
        )
    ]


def _tokens_before(rows: Sequence[Row]) -> list[int]:
    """Completion tokens of a rollout before each of its rows."""
    return [0, *accumulate(row.num_completion for row in rows)][: len(rows)]


def _by_token(row: Row, numbers: Sequence[float]) -> Floats | float:
    """Return each token's number [L]: the only one, or its turn's."""
    if len(numbers) == 1:
        return numbers[0]
    values = np.zeros(len(row.token_ids), np.float32)
    values[row.completion_mask] = np.array(numbers)[row.turns[row.completion_mask]]
    return values


def rewards_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what `RankBatch` says of all rollouts of a batch, by the names it has there."""
    credits = [credit for group in groups for credit in group.credits]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    most = max((len(credit.turn_rewards) for credit in credits), default=1)
    by_turn = np.full((len(credits), max(most, 1)), np.nan, np.float32)
    for values, credit in zip(by_turn, credits, strict=True):
        values[: len(credit.turn_rewards)] = credit.turn_rewards
    rewards = [np.nan if credit.reward is None else credit.reward for credit in credits]
    lengths = [
        sum(rollout.turn_lengths) if credit.trains else 0
        for rollout, credit in zip(rollouts, credits, strict=True)
    ]
    return {
        "rewards": np.array(rewards, np.float32),
        "group_ids": np.array(
            [i for i, group in enumerate(groups) for _ in group.credits], np.int32
        ),
        "turn_rewards": by_turn,
        "lengths": np.array(lengths, np.int32),
    }


def plan_batch(
    groups: Sequence[Group],
    aggregation: Aggregation,
    *,
    per_turn: bool = False,
    step: int,
    ranks: int,
    tokens_per_micro_batch: int,
    metrics: dict[str, float],
) -> list[RankBatch]:
    """Return one `RankBatch` per rank for these groups: weighed, planned, with their rewards.

    `per_turn`: the aggregation weighs turns.
    """
    shares = plan(
        weigh(groups, aggregation, per_turn=per_turn),
        step=step,
        ranks=ranks,
        tokens_per_micro_batch=tokens_per_micro_batch,
        metrics=metrics,
    )
    return [replace(share, **rewards_of(groups)) for share in shares]


def plan(
    rows: Sequence[WeightedRow],
    *,
    step: int,
    ranks: int,
    tokens_per_micro_batch: int,
    metrics: dict[str, float],
) -> list[RankBatch]:
    """Return one `RankBatch` per rank, balanced by tokens.

    A micro-batch holds at most `tokens_per_micro_batch` tokens, padding included, and at least
    one row. Rows without advantage come last and by themselves: most losses have no gradient
    there, and a micro-batch without any need not go backward (rl/learner/policy.py).
    """
    ordered = sorted(rows, key=lambda r: r.length, reverse=True)
    kinds = [r for r in ordered if r.teaches], [r for r in ordered if not r.teaches]
    loads = [0] * ranks  # tokens
    micro_batches: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for kind in kinds:
        # `loads` goes on from kind to kind, so that the second evens out what the first left.
        packed = [_pack(share, tokens_per_micro_batch) for share in _deal(kind, loads)]
        count = max(len(bins) for bins in packed)
        for bins, stacked in zip(packed, micro_batches, strict=True):
            _split_until(bins, count)
            stacked += map(_stack, bins)
    return [
        # A batch without any row still is a step.
        RankBatch(step=step, micro_batches=tuple(stacked or [_stack([])]), metrics=metrics)
        for stacked in micro_batches
    ]


def _deal(rows: Sequence[WeightedRow], loads: list[int]) -> list[list[WeightedRow]]:
    """Deal the longest first, each to the rank with the fewest tokens so far; adds to `loads`."""
    shares: list[list[WeightedRow]] = [[] for _ in loads]
    for row in rows:
        lightest = loads.index(min(loads))
        shares[lightest].append(row)
        loads[lightest] += row.length
    return shares


def _pack(rows: Sequence[WeightedRow], budget: int) -> list[list[WeightedRow]]:
    """Fill micro-batches with neighbours in length, so that little is padding."""
    bins: list[list[WeightedRow]] = []
    for row in rows:
        # Rows come longest first, so a micro-batch is as wide as its first.
        if bins and (len(bins[-1]) + 1) * bins[-1][0].length <= budget:
            bins[-1].append(row)
        else:
            bins.append([row])
    return bins


def _split_until(bins: list[list[WeightedRow]], count: int) -> None:
    """Halve the fullest micro-batch until there are `count`; else add an empty one."""
    while len(bins) < count:
        fullest = max(bins, key=len, default=[])
        if len(fullest) < 2:
            bins.append([])
            continue
        half = len(fullest) // 2
        bins.append(fullest[half:])
        del fullest[half:]


def _hinted(rows: Sequence[Row]) -> dict[str, Any]:
    """The same completion tokens after what a reference with hints sees; nothing where none does.

    All after a row's first completion token stays as the policy had it, replies included.
    """
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


def _stack(rows: Sequence[WeightedRow]) -> MicroBatch:
    """Pad on the right; an empty micro-batch becomes one row that counts nothing."""
    # At least two wide: the first token of a row is predicted from nothing.
    width = max((r.length for r in rows), default=2)
    height = max(len(rows), 1)
    batch = MicroBatch(
        token_ids=np.zeros((height, width), np.int32),
        completion_mask=np.zeros((height, width), np.bool_),
        rollout_logprobs=np.zeros((height, width), np.float32),
        advantages=np.zeros((height, width), np.float32),
        token_weights=np.zeros((height, width), np.float32),
        token_versions=np.full((height, width), -1, np.int32),
        turns=np.full((height, width), -1, np.int32),
        rollout_ids=np.full(height, -1, np.int32),
        first_positions=np.zeros(height, np.int32),
        row_numbers=np.zeros(height, np.int32),
        envs=tuple(r.env for r in rows) or ("",),
        **_hinted([r.row for r in rows]),
    )
    for i, weighted in enumerate(rows):
        row, length = weighted.row, weighted.length
        batch.token_ids[i, :length] = row.token_ids
        batch.completion_mask[i, :length] = row.completion_mask
        batch.rollout_logprobs[i, :length] = row.rollout_logprobs
        batch.token_versions[i, :length] = row.token_versions
        batch.turns[i, :length] = row.turns
        batch.advantages[i, :length] = weighted.advantages
        batch.token_weights[i, :length] = weighted.token_weights
        batch.rollout_ids[i] = weighted.rollout_id
        batch.first_positions[i] = weighted.first_position
        batch.row_numbers[i] = weighted.number
    return batch
