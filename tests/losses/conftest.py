"""Tables worked by hand, one row per token; the fixture compares value, gradient and metrics.

Probabilities are powers of 1/2, so ratios are exact and log probabilities multiples of ln 2.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from losses.tokens import TokenLoss, Tokens

torch.set_num_threads(1)

# (pi, anchor probability, advantage), then the expected loss and d loss / d log pi
Row = tuple[float, float, float, float, float]
CheckTable = Callable[..., None]


def logs(probabilities: Sequence[float]) -> Tensor:
    return torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64)


@pytest.fixture
def check_table() -> CheckTable:
    """check(loss function, rows, sequence_ids=None, others=None, **{metric: values})."""

    def check(
        loss_function: Callable[[Tokens], TokenLoss],
        rows: Sequence[Row],
        *,
        sequence_ids: Sequence[int] | None = None,
        others: dict[str, Tensor] | None = None,
        **metrics: list[float],
    ) -> None:
        pi, anchor, advantages, losses, gradients = zip(*rows, strict=True)
        ids = torch.tensor(sequence_ids if sequence_ids else range(len(rows)))
        logprobs = logs(pi).requires_grad_()
        tokens = Tokens.by_hand(
            logprobs,
            logs(anchor),
            torch.tensor(advantages, dtype=torch.float64),
            sequence_ids=ids,
            num_sequences=int(ids.max()) + 1,
            ref_logprobs=logs(anchor),
            **(others or {}),
        )
        out = loss_function(tokens)
        out.loss.sum().backward()
        assert logprobs.grad is not None
        expected = torch.tensor(losses, dtype=torch.float64)
        torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
        expected = torch.tensor(gradients, dtype=torch.float64)
        torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=1e-12)
        assert not any(metric.requires_grad for metric in out.metrics.values())
        assert set(out.metrics) == set(metrics)
        for name, values in metrics.items():
            expected = torch.tensor(values, dtype=out.metrics[name].dtype)
            torch.testing.assert_close(out.metrics[name], expected)

    return check
