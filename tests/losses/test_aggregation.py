"""Token weights against tables worked by hand, and invariants of any batch."""

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from losses import aggregation

Aggregation = Callable[..., list[float]]
constant_length = partial(aggregation.constant_length, length=10)

# lengths 2, 6 of prompt 7; 0, 8 of prompt 3
LENGTHS, GROUP_IDS = [2, 6, 0, 8], [7, 7, 3, 3]

TABLE = [
    (aggregation.token_mean, [1 / 16, 1 / 16, 0, 1 / 16]),
    (aggregation.sequence_mean, [1 / 6, 1 / 18, 0, 1 / 24]),  # 3 sequences with tokens
    (constant_length, [1 / 30, 1 / 30, 0, 1 / 30]),
    (aggregation.prompt_mean, [1 / 16, 1 / 16, 0, 1 / 16]),  # 2 prompts of 8 tokens
]
NAMES = ["token_mean", "sequence_mean", "constant_length", "prompt_mean"]


@pytest.mark.parametrize(("aggregate", "expected"), TABLE, ids=NAMES)
def test_weights_match_the_table(aggregate, expected):
    assert aggregate(LENGTHS, GROUP_IDS) == pytest.approx(expected, abs=1e-15)


def test_prompt_mean_gives_a_short_prompt_as_much_as_a_long_one():
    weights = aggregation.prompt_mean([1, 3, 12], [5, 5, 9])  # prompts of 4 and 12 tokens
    assert weights == pytest.approx([1 / 8, 1 / 8, 1 / 24], abs=1e-15)


def test_prompt_mean_leaves_out_a_prompt_without_tokens():
    assert aggregation.prompt_mean([0, 0, 4], [1, 1, 2]) == [0.0, 0.0, 0.25]


@pytest.mark.parametrize("aggregate", [row[0] for row in TABLE], ids=NAMES)
def test_nothing_divides_by_zero(aggregate):
    assert aggregate([], []) == []
    assert aggregate([0, 0], [1, 2]) == [0.0, 0.0]


@pytest.mark.parametrize("aggregate", [row[0] for row in TABLE], ids=NAMES)
def test_a_sequence_without_tokens_changes_nothing_for_the_others(aggregate):
    assert aggregate([2, 0, 6], [1, 1, 2])[::2] == aggregate([2, 6], [1, 2])


@pytest.mark.parametrize("aggregate", [row[0] for row in TABLE], ids=NAMES)
def test_weights_do_not_depend_on_the_order_of_sequences(aggregate):
    order = [2, 0, 3, 1]
    weights = aggregate(LENGTHS, GROUP_IDS)
    shuffled = aggregate([LENGTHS[i] for i in order], [GROUP_IDS[i] for i in order])
    assert shuffled == pytest.approx([weights[i] for i in order], abs=1e-15)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean"])
def test_the_weights_of_a_mean_sum_to_one_over_all_tokens(name):
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.choice([0, 1, rng.randint(1, 500)]) for _ in range(20)] + [1]
        group_ids = [rng.randint(0, 5) for _ in lengths]
        weights = getattr(aggregation, name)(lengths, group_ids)
        total = sum(w * length for w, length in zip(weights, lengths, strict=True))
        assert total == pytest.approx(1.0, abs=1e-12)


def test_advantages_and_aggregation_load_without_torch():
    code = "import sys, losses.advantages, losses.aggregation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_turn_with_tokens_weighs_the_same():
    assert aggregation.turn_mean([[2, 0, 4], [1]], [0, 0]) == [[1 / 6, 0, 1 / 12], [1 / 3]]
    assert aggregation.turn_mean([[0], []], [0, 1]) == [[0.0], []]
