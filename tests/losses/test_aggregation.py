"""Token weights against tables worked by hand, and invariants of any batch."""

import random
import subprocess
import sys
from functools import partial

import pytest

from losses import aggregation

# lengths 2, 6 of prompt 7; 0, 8 of prompt 3
LENGTHS, GROUP_IDS = [2, 6, 0, 8], [7, 7, 3, 3]
TABLE = {
    "token_mean": (aggregation.token_mean, [1 / 16, 1 / 16, 0, 1 / 16]),
    # 3 sequences with tokens
    "sequence_mean": (aggregation.sequence_mean, [1 / 6, 1 / 18, 0, 1 / 24]),
    "constant_length": (
        partial(aggregation.constant_length, length=10),
        [1 / 30, 1 / 30, 0, 1 / 30],
    ),
    # 2 prompts of 8 tokens
    "prompt_mean": (aggregation.prompt_mean, [1 / 16, 1 / 16, 0, 1 / 16]),
}


@pytest.mark.parametrize(("aggregate", "expected"), TABLE.values(), ids=TABLE)
def test_weights_match_the_table_and_depend_on_no_order_and_no_empty_sequence(aggregate, expected):
    assert aggregate(LENGTHS, GROUP_IDS) == pytest.approx(expected, abs=1e-15)
    order = [2, 0, 3, 1]
    shuffled = aggregate([LENGTHS[i] for i in order], [GROUP_IDS[i] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-15)
    assert aggregate([2, 0, 6], [1, 1, 2])[::2] == aggregate([2, 6], [1, 2])
    assert aggregate([], []) == []
    assert aggregate([0, 0], [1, 2]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("lengths", "group_ids", "expected"),
    [
        ([1, 3, 12], [5, 5, 9], [1 / 8, 1 / 8, 1 / 24]),  # prompts of 4 and 12 tokens
        ([0, 0, 4], [1, 1, 2], [0, 0, 1 / 4]),
    ],
    ids=["short and long", "without tokens"],
)
def test_every_prompt_with_tokens_weighs_the_same(lengths, group_ids, expected):
    assert aggregation.prompt_mean(lengths, group_ids) == pytest.approx(expected, abs=1e-15)


def test_every_turn_with_tokens_weighs_the_same():
    assert aggregation.turn_mean([[2, 0, 4], [1]], [0, 0]) == [[1 / 6, 0, 1 / 12], [1 / 3]]
    assert aggregation.turn_mean([[0], []], [0, 1]) == [[0.0], []]


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "prompt_mean"])
def test_the_weights_of_a_mean_sum_to_one_over_all_tokens(name):
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.choice([0, 1, rng.randint(1, 500)]) for _ in range(20)] + [1]
        weights = getattr(aggregation, name)(lengths, [rng.randint(0, 5) for _ in lengths])
        total = sum(w * length for w, length in zip(weights, lengths, strict=True))
        assert total == pytest.approx(1.0, abs=1e-12)


def test_advantages_and_aggregation_load_without_torch():
    code = "import sys, losses.advantages, losses.aggregation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
