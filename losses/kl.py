"""Estimators of KL(pi || ref), per token sampled from pi. Schulman 2020, "Approximating KL".

    k1 = log pi - log ref                unbiased, of either sign
    k2 = k1^2 / 2                        its gradient is that of KL(pi || ref)
    k3 = exp(-k1) + k1 - 1               unbiased, never negative

As a loss term the gradient runs through log pi: 1 for k1 (zero on average, so k1 belongs into the
reward, detached), k1 for k2, 1 - exp(-k1) for k3. Only k3 has an exp: its k1 is clamped to +-20,
beyond which the token has no gradient; k1 and k2 are not clamped.
"""

from torch import Tensor

from losses.tokens import log_ratio

# Belongs into the reward, where only an unbiased estimate will do, and not into the loss, where its
# gradient would be zero on average (rl/config/facts.py).
FOR_REWARD = ("k1",)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log pi - log ref [N]."""
    return logprobs - ref_logprobs.detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log ratio [N]."""
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """exp(-k1) + k1 - 1 [N], the KL term of GRPO, arXiv:2402.03300."""
    clamped = log_ratio(ref_logprobs.detach(), logprobs)  # [N]
    return (-clamped).exp() + clamped - 1
