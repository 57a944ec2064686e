"""The pull towards a reference policy: where it acts, how strongly, and how that adapts.

    place=loss      objective gains token_weight * beta * estimator(log pi, log ref)
    place=reward    a rollout's advantage loses beta * sum over its tokens of (log pi - log ref),
                    less the mean of its group's, without gradient (docs/losses.md says why so)

With `target_kl` beta follows the divergence: once a step

    beta *= 1 + 0.1 * clip(kl / target_kl - 1, -0.2, 0.2)            Ziegler 2019, arXiv:1909.08593
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]
"""(log pi [N], log ref [N]) -> KL per token [N]"""

_GAIN, _LARGEST_ERROR = 0.1, 0.2


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """conf/kl. With beta 0 there is no penalty, and no reference is loaded for it.

    Attributes:
        estimator: losses.kl.k1, k2 or k3.
        beta: weight of the divergence, at the first step if `target_kl` is given.
        target_kl: mean divergence per token that beta is steered to; null: beta stays.

    """

    estimator: Estimator
    beta: float
    place: Literal["loss", "reward"]
    target_kl: float | None

    @property
    def acts(self) -> bool:
        """Whether there is a penalty at all."""
        return self.beta > 0

    def next_beta(self, beta: float, kl: float) -> float:
        """Return beta for the next step, after a step with mean divergence `kl` per token.

        NaN is that of a step that was skipped: it changes nothing.
        """
        if self.target_kl is None or math.isnan(kl):
            return beta
        error = min(max(kl / self.target_kl - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return beta * (1 + _GAIN * error)
