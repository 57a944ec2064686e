"""Compare value and gradient of the loss with a table worked by hand, one row per branch."""

import math

import pytest
import torch

from losses.tokens import Tokens
from my_lab.focal import focal

LN2 = math.log(2)
# pi, probability at sampling, advantage -> loss, d loss / d log pi, focus. gamma=2, ratio_cap=3:
# loss = -focus * min(ratio, 3) * A * log pi, gradient = -focus * min(ratio, 3) * A
TABLE = [
    (1 / 2, 1 / 2, 1.0, LN2 / 4, -1 / 4, 1 / 4),  # ratio 1, focus (1/2)^2
    (1 / 2, 1 / 4, -2.0, -LN2, 1.0, 1 / 4),  # ratio 2, negative advantage
    (1 / 4, 1 / 2, 1.0, 9 / 16 * LN2, -9 / 32, 9 / 16),  # ratio 1/2, log pi = -2 ln 2
    (1 / 2, 1 / 16, 1.0, 3 / 4 * LN2, -3 / 4, 1 / 4),  # ratio 8 -> 3
    (1.0, 1.0, 5.0, 0.0, 0.0, 0.0),  # pi is 1, so focus and gradient are 0
    (1 / 2, 1 / 2, 0.0, 0.0, 0.0, 1 / 4),  # the advantage is 0
]


def tokens_of(pi: list[float], anchor: list[float], advantages: list[float]) -> Tokens:
    """Return the tokens of one sequence."""
    as_logs = [torch.tensor(p, dtype=torch.float64).log() for p in (pi, anchor)]
    return Tokens.by_hand(
        as_logs[0].requires_grad_(), as_logs[1], torch.tensor(advantages, dtype=torch.float64)
    )


def test_value_gradient_and_focus_match_the_table() -> None:
    pi, anchor, advantages, losses, gradients, focus = (
        list(column) for column in zip(*TABLE, strict=True)
    )
    tokens = tokens_of(pi, anchor, advantages)
    out = focal(tokens, gamma=2.0, ratio_cap=3.0)
    out.loss.sum().backward()
    assert out.loss.tolist() == pytest.approx(losses)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx(gradients)
    assert out.metrics["focus"].tolist() == pytest.approx(focus)


def test_with_gamma_0_all_tokens_weigh_the_same_however_sure() -> None:
    tokens = tokens_of([1.0, 0.5], [1.0, 0.5], [1.0, 1.0])
    assert focal(tokens, gamma=0.0, ratio_cap=5.0).metrics["focus"].tolist() == [1.0, 1.0]


def test_a_probability_that_rounding_lifted_above_1_is_no_nan() -> None:
    tokens = tokens_of([1.0 + 1e-9], [1.0], [1.0])
    assert focal(tokens, gamma=0.5, ratio_cap=5.0).loss.isfinite().all()
