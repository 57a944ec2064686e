"""The penalty for a divergence of the policy from the reference (conf/kl).

    place=loss      adds token_weight * beta * estimator(log pi, log ref) to the objective
    place=reward    subtracts p - (mean p of the group) from the advantage, or p if the advantage
                    compares no rollouts: p = beta * sum over the rollout of (log pi - log ref)

pi: policy in training, ref: reference. With a critic, place=reward subtracts the penalty of each
token from the reward at this token. If `target_kl` is set, the learner adapts beta after each step:

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
    """A KL estimator (losses/kl.py) and its weight. With beta=0 the penalty needs no reference."""

    estimator: Estimator
    beta: NonNegativeFloat  # initial value if `target_kl` is set
    place: Literal["loss", "reward"]
    target_kl: PositiveFloat | None  # desired mean divergence per token; None: do not adapt beta

    def next_beta(self, beta: float, kl: float) -> float:
        """Return beta for the next step. `kl`: this step's mean divergence; if NaN, keep beta."""
        if self.target_kl is None or math.isnan(kl):
            return beta
        error = min(max(kl / self.target_kl - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
        return beta * (1 + _GAIN * error)
