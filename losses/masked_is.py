"""Masked importance sampling: the unclipped surrogate, without tokens whose ratio is out of bounds.

    ratio  = pi / anchor        pi, anchor: losses/tokens.py, A: advantage
    loss_t = -1[ratio_low <= ratio <= ratio_high] * ratio * A

PPO's clip depends on the sign of the advantage, but here every token out of bounds is dropped. All
other tokens have the gradient of their ratio. The RLTrainer of `verifiers` computes this
loss with the bounds 1/8 and 8.
"""

from losses.tokens import TokenLoss, Tokens, ratio_to

ORDERED = ("ratio_low", "ratio_high")  # rl/config/limits.py requires ratio_low < ratio_high


def masked_is(tokens: Tokens, *, ratio_low: float, ratio_high: float) -> TokenLoss:
    """Return the masked surrogate [N]. Metrics are 1 at dropped tokens: all, too low, too high."""
    ratio = ratio_to(tokens.anchor, tokens.logprobs)  # [N]
    low, high = ratio < ratio_low, ratio > ratio_high  # [N], [N]
    keep = ~(low | high)  # [N]
    loss = -(keep * ratio * tokens.advantages)  # [N]
    metrics = {
        "masked_fraction": (~keep).float(),
        "masked_fraction_low": low.float(),
        "masked_fraction_high": high.float(),
    }
    return TokenLoss(loss, metrics, tokens.ratio_clamped)
