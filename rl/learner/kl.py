"""The penalty for moving away from a reference policy (conf/kl).

    place=loss      objective gains token_weight * beta * estimator(log pi, log ref)
    place=reward    a rollout's advantage loses beta * sum over its tokens of (log pi - log ref),
                    minus the mean of its group, without gradient (docs/losses.md says why)

With `target_kl` beta is adapted after every step:

    beta *= 1 + 0.1 * clip(kl / target_kl - 1, -0.2, 0.2)            Ziegler 2019, arXiv:1909.08593
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from rl.config.ranges import NonNegativeFloat, PositiveFloat

Estimator = Callable[[Tensor, Tensor], Tensor]
"""(log pi [N], log ref [N]) -> KL per token [N]"""

_GAIN, _LARGEST_ERROR = 0.1, 0.2


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """The estimator (losses/kl.py) and its weight; with beta 0 no reference is loaded for it."""

    estimator: Estimator
    beta: NonNegativeFloat  # of the first step, if `target_kl` is given
    place: Literal["loss", "reward"]
    target_kl: PositiveFloat | None  # mean divergence per token that beta is steered to

    @property
    def acts(self) -> bool:
        """True if there is a penalty."""
        return self.beta > 0

    def next_beta(self, beta: float, kl: float) -> float:
        """Return beta for the next step, after a step with mean divergence `kl` per token.

        A skipped step has the divergence NaN and changes nothing.
        """
        if self.target_kl is None or math.isnan(kl):
            return beta
        error = min(max(kl / self.target_kl - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return beta * (1 + _GAIN * error)
