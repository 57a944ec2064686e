"""The split of a batch loses, repeats and reweights no row."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.aggregation import constant_length, prompt_mean, sequence_mean, token_mean
from rl.records import Credit, MicroBatch, TrainingRow, columns_of
from rl.rollouts.plan import WeightedRow, plan, weighted_row, weighted_rows
from rl.wire import pack as pack_message
from rl.wire import unpack
from tests.support.rollouts import group, rollout

BUDGET = 32
NEVER = 1000
SETTINGS = {"step": 4, "tokens_per_micro_batch": BUDGET, "metrics": {"a": 1.0}}
AGGREGATIONS = [token_mean, sequence_mean, prompt_mean, partial(constant_length, length=7)]
lengths = st.lists(st.integers(2, 40), max_size=30)
idle = st.sampled_from([1, 2, 3, NEVER])
splits = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def row(number: int, length: int, prompt: int = 1) -> TrainingRow:
    """Return a row whose first token is its number; no token is 0."""
    versions = np.full(length, number % 3, np.int32)
    versions[:prompt] = -1
    return TrainingRow(
        token_ids=np.array([number + 1, *range(100, 99 + length)], np.int32),
        completion_mask=versions >= 0,
        rollout_logprobs=np.where(versions >= 0, -0.5 - np.arange(length), 0).astype(np.float32),
        token_versions=versions,
        turns=np.where(versions >= 0, 0, -1).astype(np.int32),
    )


def weighted(lengths: list[int], idle: int = NEVER) -> list[WeightedRow]:
    """Return rows of which every `idle`-th has no advantage."""
    numbers = [0.0 if i % idle == idle - 1 else i + 0.25 for i in range(len(lengths))]
    return [
        weighted_row(row(i, n), (number,), (1 / (i + 1),), rollout_id=i)
        for i, (n, number) in enumerate(zip(lengths, numbers, strict=True))
    ]


def with_kept(row: WeightedRow) -> WeightedRow:
    """Return row n with n % 3 kept tokens at each position, or none."""
    size = row.rollout_id % 3
    own = 1000 * row.rollout_id + np.arange(row.num_completion, dtype=np.int32)
    return replace(row, kept=np.stack([own] * size, -1) if size else None)


def all_of(batches) -> list[MicroBatch]:
    return [micro for batch in batches for micro in batch.micro_batches]


def check_columns(micro: MicroBatch, rows: list[WeightedRow]) -> list[int]:
    """Check all columns of a micro-batch, and return the numbers of its rows."""
    padding = micro.token_ids == 0
    assert (np.diff(padding.astype(int), axis=1) >= 0).all()  # on the right
    assert padding[:, -1].sum() < len(padding) or padding.all()
    numbers = [int(first) - 1 for first in micro.token_ids[:, 0] if first]  # 0: an empty one
    for name, column in columns_of(WeightedRow).items():
        values = getattr(micro, name)
        assert (values[padding] == column.fill).all(), name
        for number, found in zip(numbers, values, strict=False):
            original = getattr(rows[number], name).tolist()
            assert found[: len(original)].tolist() == original, name
    return numbers


def check_kept(micro: MicroBatch) -> int:
    """Check that kept tokens follow their tokens, and return how many tokens have any."""
    if micro.kept is None:
        assert not any(number % 3 for number in micro.rollout_ids if number >= 0)
        return 0
    numbers = micro.rollout_ids[micro.completion_mask.nonzero()[0]]
    for number, own in zip(numbers, micro.kept, strict=True):
        assert (own >= 0).sum() == number % 3
        assert (own[own >= 0] // 1000 == number).all()
    unpacked = unpack(pack_message(micro), MicroBatch)
    np.testing.assert_array_equal(unpacked.kept, micro.kept)
    return int((numbers % 3 > 0).sum())


@given(lengths, st.integers(1, 5), idle, st.booleans())
@splits
def test_every_split_has_each_row_once_and_equally_much_work_for_each_rank(
    lengths, ranks, idle, shared
):
    rows = [with_kept(row) for row in weighted(lengths, idle)]
    batches = plan(rows, ranks=ranks, shares_prefixes=shared, **SETTINGS)
    numbers = [number for micro in all_of(batches) for number in check_columns(micro, rows)]
    assert sorted(numbers) == list(range(len(lengths)))
    num_kept = sum(row.num_completion for row in rows if row.kept is not None)
    assert sum(map(check_kept, all_of(batches))) == num_kept
    (count,) = {len(batch.micro_batches) for batch in batches}
    assert count >= 1
    for micro in [] if shared else all_of(batches):
        assert micro.token_ids.size <= BUDGET or len(micro.token_ids) == 1  # padding included
    # The first tokens of all rows differ, so that ranks that share prefixes compute all tokens.
    loads = [sum((m.token_ids > 0).sum() for m in batch.micro_batches) for batch in batches]
    assert max(loads) - min(loads) <= (1 + shared) * max(lengths, default=0)
    # Rows without an advantage come last on all ranks, which skip the same backward passes.
    for same_place in zip(*(batch.micro_batches for batch in batches), strict=True):
        of_rows = [micro.advantages[micro.rollout_ids >= 0].any(axis=1) for micro in same_place]
        assert len(set(np.concatenate(of_rows).tolist())) <= 1
    for batch in batches:
        weighing = [micro for micro in batch.micro_batches if micro.token_weights.any()]
        pulls = [bool(micro.advantages.any()) for micro in weighing]
        assert pulls == sorted(pulls, reverse=True)


@pytest.mark.parametrize("lengths", [[5], []], ids=["one row", "no row at all"])
def test_a_rank_without_rows_gets_a_micro_batch_of_weight_0(lengths):
    (micro,) = plan(weighted(lengths), ranks=3, **SETTINGS)[-1].micro_batches
    assert micro.token_ids.shape == (1, 2)
    assert not micro.completion_mask.any()
    assert not micro.token_weights.any()
    assert (micro.token_versions == -1).all()


completions = st.lists(st.integers(1, 9), max_size=2)
rollouts_of_groups = st.lists(st.lists(completions, min_size=1, max_size=4), min_size=1, max_size=4)


@given(rollouts_of_groups, st.sampled_from(AGGREGATIONS), st.integers(1, 4))
@splits
def test_token_weights_are_those_of_the_aggregation_over_the_whole_batch(groups, how, ranks):
    number, made, expected, units = 0, [], {}, []
    for g, numbers in enumerate(groups):
        rollouts = []
        for completions in numbers:
            rows = [row(number + i, n + 2, prompt=2) for i, n in enumerate(completions)]
            expected |= {number + i: (len(units), g) for i in range(len(rows))}
            units.append((sum(completions), g))  # a rollout is one unit with any number of rows
            number += len(rows)
            rollouts.append(rollout(0.0, *rows, lengths=()))
        credits = [Credit(0.0, (10.0 * g + i,)) for i in range(len(rollouts))]
        made.append(group(rollouts, credits, index=g))
    batches = plan(weighted_rows(made, how), ranks=ranks, **SETTINGS)
    weights = how([n for n, _ in units], [g for _, g in units])
    got = {
        int(micro.token_ids[i, 0]) - 1: (weight[2], micro.advantages[i, 2] // 10)
        for micro in all_of(batches)
        for i, weight in enumerate(micro.token_weights)
        if micro.token_ids[i, 0] > 0
    }
    assert got == {i: (np.float32(weights[unit]), g) for i, (unit, g) in expected.items()}
