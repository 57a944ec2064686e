"""Check that a loss of whole groups depends neither on the order of tokens nor on micro-batches."""

from collections.abc import Callable

import pytest

from losses.tokens import TokenLoss, Tokens

Table = list[tuple[float, ...]]  # ten rows, one per token; column 1 is the group, from 0 to 3


def check_order_and_splits(
    loss: Callable[[Tokens], TokenLoss], tokens_of: Callable[[Table], Tokens], table: Table
) -> None:
    whole = loss(tokens_of(table)).loss.tolist()
    order = [9, 3, 5, 0, 7, 2, 6, 8, 1, 4]
    mixed = loss(tokens_of([table[i] for i in order])).loss.tolist()
    assert mixed == pytest.approx([whole[i] for i in order])
    for group in range(4):
        members = [i for i, row in enumerate(table) if row[1] == group]
        alone = loss(tokens_of([table[i] for i in members])).loss.tolist()
        assert alone == pytest.approx([whole[i] for i in members])
