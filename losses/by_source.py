"""Reinforcement and imitation in one batch: the source of a token selects its loss.

    loss_t = policy_loss_t                          the current or an older policy sampled the token
    loss_t = -demonstration_weight * log pi         the token is a demonstration

SRFT, arXiv:2506.19767, and CHORD, arXiv:2508.11408, adapt the weight of demonstrations. Here
the option demonstration_weight sets it. policy_loss gets the demonstrations, too, so its loss of a
sequence must not depend on other sequences. The metrics of policy_loss are 0 at demonstrations.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from losses.groups import Source
from losses.tokens import TokenLoss, Tokens


def by_source(
    tokens: Tokens, *, policy_loss: Callable[[Tokens], TokenLoss], demonstration_weight: float
) -> TokenLoss:
    """Return the loss [N]: the weighted cross entropy at demonstrations, else `policy_loss`."""
    is_demonstration = tokens.source == Source.DEMONSTRATION  # [N]
    imitation = -demonstration_weight * tokens.logprobs  # [N]

    def select(values: Tensor, at_demonstrations: Tensor | float = 0.0) -> Tensor:
        return torch.where(is_demonstration, at_demonstrations, values)

    result = policy_loss(tokens)
    metrics = {name: select(values) for name, values in result.metrics.items()}
    clamped = None if result.ratio_clamped is None else select(result.ratio_clamped)
    return TokenLoss(select(result.loss, imitation), metrics, clamped)
