"""Estimators of KL(pi || ref) from one token sampled from pi. Schulman 2020, "Approximating KL".

    k1 = log pi - log ref                unbiased, of either sign
    k2 = k1^2 / 2                        biased, but its mean gradient is that of KL(pi || ref)
    k3 = exp(-k1) + k1 - 1               unbiased, never negative

As loss terms, k1, k2 and k3 have the gradients 1, k1 and 1 - exp(-k1) with respect to log pi.
The gradient of k1 is zero on average, so use k1 only in the reward, without gradient. k3 clamps its
k1 to +-20 and has no gradient beyond the clamp. k1 and k2 have no exponential and no clamp.
"""

from torch import Tensor

from losses.tokens import log_ratio


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the log ratio log pi - log ref [N]."""
    return logprobs - ref_logprobs.detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return half the squared log ratio [N]."""
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-k1) + k1 - 1 [N], the KL term of GRPO, arXiv:2402.03300."""
    clamped = log_ratio(ref_logprobs.detach(), logprobs)  # [N]
    return (-clamped).exp() + clamped - 1
