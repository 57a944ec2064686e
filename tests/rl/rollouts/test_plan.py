"""The split of a batch loses, repeats and reweights no row."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.aggregation import constant_length, prompt_mean, sequence_mean, token_mean
from rl.records import Credit, MicroBatch, TrainingRow, columns_of
from rl.rollouts.packing import pack
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


def planned(lengths: list[int], ranks: int, idle: int = NEVER, *, shared: bool = False):
    return plan(weighted(lengths, idle), ranks=ranks, shares_prefixes=shared, **SETTINGS)


def all_of(batches) -> list[MicroBatch]:
    return [micro for batch in batches for micro in batch.micro_batches]


@given(lengths, st.integers(1, 5), idle, st.booleans())
@splits
def test_kept_tokens_follow_their_tokens_in_every_split(lengths, ranks, idle, shared):
    rows = []
    for row in weighted(lengths, idle):
        # Row n has n % 3 kept tokens at each position, or none.
        count, size = row.num_completion, row.rollout_id % 3
        own = 1000 * row.rollout_id + np.arange(count, dtype=np.int32)
        kept = np.stack([own] * size, -1) if size else None
        rows.append(replace(row, kept=kept))
    batches, seen = plan(rows, ranks=ranks, shares_prefixes=shared, **SETTINGS), 0
    for micro in all_of(batches):
        if micro.kept is None:
            assert not any(number % 3 for number in micro.rollout_ids if number >= 0)
            continue
        flat = micro.completion_mask.nonzero()[0]
        assert len(micro.kept) == len(flat)
        for place, own in zip(flat, micro.kept, strict=True):
            number = int(micro.rollout_ids[place])
            seen += number % 3 > 0
            assert (own >= 0).sum() == number % 3
            assert (own[own >= 0] // 1000 == number).all()
        unpacked = unpack(pack_message(micro), MicroBatch)
        np.testing.assert_array_equal(unpacked.kept, micro.kept)
    assert seen == sum(row.num_completion for row in rows if row.rollout_id % 3)


@given(lengths, st.integers(1, 5), idle, st.booleans())
@splits
def test_every_row_is_in_exactly_one_micro_batch_and_padded_on_the_right(
    lengths, ranks, idle, shared
):
    found, rows = [], weighted(lengths, idle)
    for micro in all_of(planned(lengths, ranks, idle, shared=shared)):
        padding = micro.token_ids == 0
        assert (np.diff(padding.astype(int), axis=1) >= 0).all()
        assert padding[:, -1].sum() < len(padding) or padding.all()
        numbers = [int(first) - 1 for first in micro.token_ids[:, 0] if first]  # 0: an empty one
        found += numbers
        for name, column in columns_of(WeightedRow).items():
            values = getattr(micro, name)
            assert (values[padding] == column.fill).all(), name
            for number, row in zip(numbers, values, strict=False):
                original = getattr(rows[number], name).tolist()
                assert row[: len(original)].tolist() == original, name
    assert sorted(found) == list(range(len(lengths)))


@given(lengths, st.integers(1, 5), idle, st.booleans())
@splits
def test_the_ranks_get_equally_many_micro_batches_and_tokens(lengths, ranks, idle, shared):
    batches = planned(lengths, ranks, idle, shared=shared)
    (count,) = {len(batch.micro_batches) for batch in batches}
    assert count >= 1
    for micro in [] if shared else all_of(batches):
        assert micro.token_ids.size <= BUDGET or len(micro.token_ids) == 1  # padding included
    # The first tokens of all rows differ, so that ranks that share prefixes compute all tokens.
    loads = [sum((m.token_ids > 0).sum() for m in batch.micro_batches) for batch in batches]
    assert max(loads) - min(loads) <= (1 + shared) * max(lengths, default=0)


@given(lengths, st.integers(1, 5), idle, st.booleans())
@splits
def test_rows_without_advantage_are_in_the_last_micro_batches_of_every_rank(
    lengths, ranks, idle, shared
):
    """All ranks then skip the same backward passes."""
    batches = planned(lengths, ranks, idle, shared=shared)
    for same_place in zip(*(batch.micro_batches for batch in batches), strict=True):
        rows = [micro.advantages[micro.rollout_ids >= 0].any(axis=1) for micro in same_place]
        assert len({bool(a) for a in np.concatenate(rows)}) <= 1
    for batch in batches:
        weighing = [micro for micro in batch.micro_batches if micro.token_weights.any()]
        pulls = [bool(micro.advantages.any()) for micro in weighing]
        assert pulls == sorted(pulls, reverse=True)


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ([8] * 16, [[(4, 8)] * 4]),
        ([30, 4, 30, 4, 4, 4], [[(1, 30), (1, 30), (4, 4)]]),
        # A rank with fewer micro-batches splits its own.
        ([20, 8, 8, 8, 8, 8, 8], [[(1, 20), (2, 8)], [(2, 8), (2, 8)]]),
    ],
)
def test_micro_batches_are_filled_with_rows_of_similar_length(lengths, shapes):
    batches = planned(lengths, ranks=len(shapes))
    assert [[m.token_ids.shape for m in batch.micro_batches] for batch in batches] == shapes
    assert [(b.step, b.metrics) for b in batches] == [(4, {"a": 1.0})] * len(shapes)


def of_groups(ranks: int, budget: int, num_groups: int = 4, size: int = 5):
    """Plan groups of rows with a prompt of 20 tokens and one answer token, in mixed order."""
    numbers = [(g, i) for i in range(size) for g in range(num_groups)]
    rows = [
        replace(made, token_ids=np.array([9 - g, *range(20, 39), i + 1], np.int32))
        for made, (g, i) in zip(weighted([21] * len(numbers)), numbers, strict=True)
    ]
    settings = {**SETTINGS, "tokens_per_micro_batch": budget}
    batches = plan(rows, ranks=ranks, shares_prefixes=True, **settings)
    return [[m.token_ids[:, 0].tolist() for m in batch.micro_batches] for batch in batches]


@pytest.mark.parametrize(
    ("num_groups", "ranks", "budget", "expected"),
    [
        # A group has 25 distinct tokens, and copies of 105 tokens, which count a quarter.
        (4, 1, 1000, [[[6] * 5 + [7] * 5 + [8] * 5 + [9] * 5]]),
        (4, 1, 103, [[[6] * 5 + [7] * 5, [8] * 5 + [9] * 5]]),
        (4, 1, 52, [[[6] * 5, [7] * 5, [8] * 5, [9] * 5]]),
        (4, 2, 103, [[[6] * 5 + [7] * 5], [[8] * 5 + [9] * 5]]),
        (4, 4, 52, [[[6] * 5], [[7] * 5], [[8] * 5], [[9] * 5]]),
        (1, 1, 40, [[[9] * 3, [9] * 2]]),  # a group that is too large is cut
    ],
)
def test_rows_with_equal_beginnings_stay_together(num_groups, ranks, budget, expected):
    assert of_groups(ranks, budget, num_groups) == expected


def row_of(*token_ids: int, completion: int = 1) -> TrainingRow:
    made = row(0, len(token_ids), len(token_ids) - completion)
    return replace(made, token_ids=np.array(token_ids, np.int32))


def answers(num_groups: int, size: int = 16) -> list[TrainingRow]:
    """Return groups of rows with a prompt of 2000 tokens and answers of 100."""
    numbers = [(g, i) for g in range(num_groups) for i in range(size)]
    return [row_of(g, *range(1, 2000), *[i] * 100, completion=100) for g, i in numbers]


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (answers(1), 8, [2200] * 8),
        (answers(2), 8, [2400] * 8),
        ([row(i, 4000 if i == 9 else 10) for i in range(32)], 16, [90, 4000, 20]),
        ([row(i, 10) for i in range(9)], 8, [10] * 6),
        ([row(0, 5)], 3, [5, 0, 0]),
    ],
)
def test_the_largest_load_of_a_rank_that_shares_prefixes_is_as_small_as_possible(
    rows, ranks, expected
):
    loads = [0] * ranks
    pack(rows, loads, 10_000, shares_prefixes=True)
    assert loads[: len(expected)] == expected


def test_equal_rows_fill_a_micro_batch_by_their_completions():
    rows = [row_of(*range(2000), completion=1000)] * 256
    assert [len(packed) for packed in pack(rows, [0], 16_384, shares_prefixes=True)] == [5]


@pytest.mark.parametrize("lengths", [[5], []], ids=["one row", "no row at all"])
def test_a_rank_without_rows_gets_a_micro_batch_of_weight_0(lengths):
    (micro,) = planned(lengths, ranks=3)[-1].micro_batches
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
