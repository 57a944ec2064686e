"""Token weights against tables worked by hand, and invariants of any batch."""

from functools import partial

import pytest

from losses import aggregation

# lengths 2, 6 of prompt 7; 0, 12 of prompt 3; 0 of prompt 5
LENGTHS, GROUP_IDS = [2, 6, 0, 12, 0], [7, 7, 3, 3, 5]
TABLE = {
    "token_mean": (aggregation.token_mean, [1 / 20, 1 / 20, 0, 1 / 20, 0]),
    # 3 sequences with tokens
    "sequence_mean": (aggregation.sequence_mean, [1 / 6, 1 / 18, 0, 1 / 36, 0]),
    "constant_length": (
        partial(aggregation.constant_length, length=10),
        [1 / 30, 1 / 30, 0, 1 / 30, 0],
    ),
    # prompts of 8 and 12 tokens, and one without
    "prompt_mean": (aggregation.prompt_mean, [1 / 16, 1 / 16, 0, 1 / 24, 0]),
}


@pytest.mark.parametrize(("aggregate", "expected"), TABLE.values(), ids=TABLE)
def test_weights_match_the_table_and_depend_on_no_order_and_no_empty_sequence(aggregate, expected):
    assert aggregate(LENGTHS, GROUP_IDS) == pytest.approx(expected, abs=1e-15)
    order = [2, 0, 4, 3, 1]
    shuffled = aggregate([LENGTHS[i] for i in order], [GROUP_IDS[i] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-15)
    assert aggregate([2, 0, 6], [1, 1, 2])[::2] == aggregate([2, 6], [1, 2])
    assert aggregate([], []) == []
    assert aggregate([0, 0], [1, 2]) == [0.0, 0.0]


def test_every_turn_with_tokens_weighs_the_same():
    assert aggregation.turn_mean([[2, 0, 4], [1]], [0, 0]) == [[1 / 6, 0, 1 / 12], [1 / 3]]
    assert aggregation.turn_mean([[0], []], [0, 1]) == [[0.0], []]
