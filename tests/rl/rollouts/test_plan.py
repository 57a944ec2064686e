"""The split of a batch loses, repeats and reweights no row."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.episode import Example, StopReason
from losses.aggregation import constant_length, prompt_mean, sequence_mean, token_mean
from rl.records import Credit, Group, MicroBatch, Rollout, TrainingRow, columns_of
from rl.rollouts.packing import pack
from rl.rollouts.plan import WeightedRow, plan, weighted_row, weighted_rows
from rl.wire import pack as pack_message
from rl.wire import unpack

BUDGET = 32
NEVER = 1000
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
    return [
        weighted_row(
            row(i, n), (0.0 if i % idle == idle - 1 else i + 0.25,), (1 / (i + 1),), rollout_id=i
        )
        for i, n in enumerate(lengths)
    ]


def planned(lengths: list[int], ranks: int, idle: int = NEVER, *, shared: bool = False):
    return plan(
        weighted(lengths, idle),
        step=4,
        ranks=ranks,
        tokens_per_micro_batch=BUDGET,
        metrics={"a": 1.0},
        shares_prefixes=shared,
    )


def tokens_of(batch) -> int:
    return sum(int((micro.token_ids > 0).sum()) for micro in batch.micro_batches)


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
    settings = {"step": 4, "ranks": ranks, "tokens_per_micro_batch": BUDGET, "metrics": {}}
    seen = 0
    for micro in (
        m for b in plan(rows, **settings, shares_prefixes=shared) for m in b.micro_batches
    ):
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
def test_every_row_is_in_exactly_one_micro_batch(lengths, ranks, idle, shared):
    found, batches = {}, planned(lengths, ranks, idle, shared=shared)
    for micro in (m for batch in batches for m in batch.micro_batches):
        for i, first in enumerate(micro.token_ids[:, 0] - 1):
            if first < 0:  # the row of an empty micro-batch
                continue
            assert first not in found
            found[first] = True
            original = weighted(lengths, idle)[first]
            for name in columns_of(WeightedRow):
                values = getattr(micro, name)[i, : original.length]
                assert values.tolist() == getattr(original, name).tolist(), name
    assert len(found) == len(lengths)


@given(lengths, st.integers(1, 5), idle)
@splits
def test_padding_is_on_the_right_and_has_fill_values(lengths, ranks, idle):
    for micro in (m for batch in planned(lengths, ranks, idle) for m in batch.micro_batches):
        padding = micro.token_ids == 0
        assert (np.diff(padding.astype(int), axis=1) >= 0).all()
        for name, column in columns_of(WeightedRow).items():
            assert (getattr(micro, name)[padding] == column.fill).all(), name
        assert padding[:, -1].sum() < len(padding) or padding.all()


@given(lengths, st.integers(1, 5), idle)
@splits
def test_the_ranks_get_equally_many_micro_batches_and_tokens(lengths, ranks, idle):
    batches = planned(lengths, ranks, idle)
    (count,) = {len(batch.micro_batches) for batch in batches}
    assert count >= 1
    for micro in (m for batch in batches for m in batch.micro_batches):
        assert micro.token_ids.size <= BUDGET or len(micro.token_ids) == 1  # padding included
    loads = [tokens_of(batch) for batch in batches]
    assert max(loads) - min(loads) <= max(lengths, default=0)


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
        pulls = [
            bool(micro.advantages.any())
            for micro in batch.micro_batches
            if micro.token_weights.any()
        ]
        assert pulls == sorted(pulls, reverse=True)


def test_micro_batches_are_filled():
    (batch,) = planned([8] * 16, ranks=1)
    assert [micro.token_ids.shape for micro in batch.micro_batches] == [(4, 8)] * 4


def test_rows_of_similar_length_share_a_micro_batch():
    (batch,) = planned([30, 4, 30, 4, 4, 4], ranks=1)
    assert [micro.token_ids.shape for micro in batch.micro_batches] == [(1, 30), (1, 30), (4, 4)]


def test_a_rank_with_fewer_micro_batches_splits_its_own():
    long, short = planned([20, 8, 8, 8, 8, 8, 8], ranks=2)
    assert [micro.token_ids.shape for micro in long.micro_batches] == [(1, 20), (2, 8)]
    assert [micro.token_ids.shape for micro in short.micro_batches] == [(2, 8), (2, 8)]


def of_groups(ranks: int, budget: int, num_groups: int = 4, size: int = 5):
    """Plan groups of rows with a prompt of 20 tokens and one answer token, in mixed order."""
    numbers = [(g, i) for i in range(size) for g in range(num_groups)]
    rows = [
        replace(made, token_ids=np.array([9 - g, *range(20, 39), i + 1], np.int32))
        for made, (g, i) in zip(weighted([21] * len(numbers)), numbers, strict=True)
    ]
    settings = {"step": 0, "metrics": {}, "shares_prefixes": True}
    batches = plan(rows, ranks=ranks, tokens_per_micro_batch=budget, **settings)
    return [[m.token_ids[:, 0].tolist() for m in batch.micro_batches] for batch in batches]


@pytest.mark.parametrize(
    ("ranks", "budget", "expected"),
    [
        # A group has 25 distinct tokens, and copies of 105 tokens, which count a quarter.
        (1, 1000, [[[6] * 5 + [7] * 5 + [8] * 5 + [9] * 5]]),
        (1, 103, [[[6] * 5 + [7] * 5, [8] * 5 + [9] * 5]]),
        (1, 52, [[[6] * 5, [7] * 5, [8] * 5, [9] * 5]]),
        (2, 103, [[[6] * 5 + [7] * 5], [[8] * 5 + [9] * 5]]),
        (4, 52, [[[6] * 5], [[7] * 5], [[8] * 5], [[9] * 5]]),
    ],
)
def test_rows_with_equal_beginnings_stay_together(ranks, budget, expected):
    assert of_groups(ranks, budget) == expected


def test_a_group_that_is_too_large_is_cut():
    assert of_groups(1, 40, num_groups=1) == [[[9] * 3, [9] * 2]]


@given(lengths, st.integers(1, 5), idle)
@splits
def test_ranks_that_share_prefixes_get_equally_many_micro_batches_and_new_tokens(
    lengths, ranks, idle
):
    batches = planned(lengths, ranks, idle, shared=True)
    (count,) = {len(batch.micro_batches) for batch in batches}
    assert count >= 1
    loads = [tokens_of(batch) for batch in batches]  # the first tokens of all rows differ
    assert max(loads) - min(loads) <= 2 * max(lengths, default=0)


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
    (packed,) = pack(rows, [0], 16_384, shares_prefixes=True)
    assert len(packed) == 5


@pytest.mark.parametrize("lengths", [[5], []], ids=["one row", "no row at all"])
def test_a_rank_without_rows_gets_a_micro_batch_of_weight_0(lengths):
    *_, idle = planned(lengths, ranks=3)
    (micro,) = idle.micro_batches
    assert micro.token_ids.shape == (1, 2)
    assert not micro.completion_mask.any()
    assert not micro.token_weights.any()
    assert (micro.token_versions == -1).all()


def test_every_rank_gets_step_and_metrics():
    assert [(b.step, b.metrics) for b in planned([4, 4], ranks=2)] == [(4, {"a": 1.0})] * 2


rollouts_of_groups = st.lists(
    st.lists(st.lists(st.integers(1, 9), max_size=2), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


@given(rollouts_of_groups, st.sampled_from(AGGREGATIONS), st.integers(1, 4))
@splits
def test_token_weights_are_those_of_the_aggregation_over_the_whole_batch(groups, how, ranks):
    number, made, expected, units = 0, [], {}, []
    for g, group in enumerate(groups):
        rollouts = []
        for completions in group:
            rows = [row(number + i, n + 2, prompt=2) for i, n in enumerate(completions)]
            expected |= {number + i: (len(units), g) for i in range(len(rows))}
            units.append((sum(completions), g))  # a rollout is one unit with any number of rows
            number += len(rows)
            rollouts.append(Rollout(tuple(rows), [], 0.0, {}, StopReason.STOP, 1, 0.0))
        credits = tuple(Credit(0.0, (10.0 * g + i,)) for i in range(len(rollouts)))
        made.append(Group(g, Example(0, "e", []), 0, tuple(rollouts), credits))
    rows = weighted_rows(made, how)
    batches = plan(rows, step=0, ranks=ranks, tokens_per_micro_batch=BUDGET, metrics={})
    weights = how([n for n, _ in units], [g for _, g in units])
    got = {
        int(micro.token_ids[i, 0]) - 1: (weight[2], micro.advantages[i, 2] // 10)
        for batch in batches
        for micro in batch.micro_batches
        for i, weight in enumerate(micro.token_weights)
        if micro.token_ids[i, 0] > 0
    }
    assert got == {i: (np.float32(weights[unit]), g) for i, (unit, g) in expected.items()}
