"""The critic's loss against numbers worked by hand, value and gradient, one row a branch."""

import pytest
import torch

from losses.squared_error import squared_error

PLAIN = [  # value, return, old value; loss = (V - R)^2 / 2, gradient V - R
    (1.0, 3.0, 0.0, 2.0, -2.0, 0),
    (3.0, 1.0, 3.0, 2.0, 2.0, 0),
    (1.0, 1.0, -9.0, 0.0, 0.0, 0),
]
CLIPPED = [  # the value may move 0.5 from the old one
    (0.25, 1.0, 0.0, 0.28125, -0.75, 0),  # within: 0.75^2 / 2
    (1.0, 2.0, 0.0, 1.125, 0.0, 1),  # beyond, towards the return: (0.5 - 2)^2 / 2 is the larger
    (-1.0, -2.0, 0.0, 1.125, 0.0, 1),  # likewise below
    (-1.0, 1.0, 0.0, 2.0, -2.0, 1),  # beyond, away from the return: (-1 - 1)^2 / 2 is the larger
    (1.0, 0.5, 0.0, 0.125, 0.5, 1),  # beyond the return as well: the bounded one is on it
    (2.0, 3.0, 2.0, 0.5, -1.0, 0),  # not moved
    (0.5, 1.0, 0.0, 0.125, -0.5, 0),  # moved by exactly 0.5
]


@pytest.mark.parametrize(("rows", "clip"), [(PLAIN, None), (CLIPPED, 0.5)], ids=["null", "0.5"])
def test_loss_and_gradient_match_the_table(rows, clip):
    columns = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    values, returns, old_values, losses, gradients, beyond = columns
    values.requires_grad_()
    result = squared_error(values, returns, old_values, clip=clip)
    result.loss.sum().backward()
    torch.testing.assert_close(result.loss, losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(values.grad, gradients, rtol=1e-12, atol=1e-12)
    if clip is None:
        assert result.metrics == {}
    else:
        torch.testing.assert_close(result.metrics["value_clip_fraction"].double(), beyond)
        assert not result.metrics["value_clip_fraction"].requires_grad
