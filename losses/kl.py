"""Estimators of KL(pi || ref) from one token sampled from pi. Schulman 2020, "Approximating KL".

    k1 = log pi - log ref                unbiased, of either sign
    k2 = k1^2 / 2                        its gradient is that of KL(pi || ref)
    k3 = exp(-k1) + k1 - 1               unbiased, never negative

As a loss term the gradient with respect to log pi is 1 for k1, k1 for k2, and 1 - exp(-k1) for k3.
The gradient of k1 is zero on average, so k1 belongs in the reward, detached. k3 clamps its k1 to
+-20 because of the exp, and has no gradient beyond. k1 and k2 are not clamped.
"""

from torch import Tensor

from losses.tokens import log_ratio


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return log pi - log ref [N]."""
    return logprobs - ref_logprobs.detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return half the squared log ratio [N]."""
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-k1) + k1 - 1 [N], the KL term of GRPO, arXiv:2402.03300."""
    clamped = log_ratio(ref_logprobs.detach(), logprobs)  # [N]
    return (-clamped).exp() + clamped - 1
