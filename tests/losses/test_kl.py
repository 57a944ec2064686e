"""KL estimators against numbers worked by hand, value and gradient."""

import pytest
import torch

from losses.kl import k1, k2, k3

LN2 = 0.6931471805599453
# log pi - log ref = ln 2 (ratio 2), -ln 2, 0, and 30 and -30, beyond the clamp of k3
LOG_PI = (-LN2, -2 * LN2, -LN2, -1.0, -31.0)
LOG_REF = (-2 * LN2, -LN2, -LN2, -31.0, -1.0)
E_20 = 2.061153622438558e-9
E20 = 485165195.4097903

TABLE = [
    # k1 = log pi - log ref, gradient 1
    (k1, (LN2, -LN2, 0.0, 30.0, -30.0), (1.0, 1.0, 1.0, 1.0, 1.0)),
    # k2 = k1^2 / 2, gradient k1
    (k2, (LN2 * LN2 / 2, LN2 * LN2 / 2, 0.0, 450.0, 450.0), (LN2, -LN2, 0.0, 30.0, -30.0)),
    # k3 = exp(-k1) + k1 - 1: 1/2 + ln 2 - 1 and 2 - ln 2 - 1; gradient 1 - exp(-k1): 1/2 and -1
    (k3, (LN2 - 0.5, 1 - LN2, 0.0, E_20 + 19.0, E20 - 21.0), (0.5, -1.0, 0.0, 0.0, 0.0)),
]


@pytest.mark.parametrize(("estimator", "values", "gradients"), TABLE, ids=["k1", "k2", "k3"])
def test_kl_value_and_gradient(estimator, values, gradients):
    logprobs = torch.tensor(LOG_PI, dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.tensor(LOG_REF, dtype=torch.float64, requires_grad=True)
    out = estimator(logprobs, ref_logprobs)
    out.sum().backward()
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    expected = torch.tensor(gradients, dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-12, atol=1e-12)
    assert ref_logprobs.grad is None
