"""DPPO: drop tokens whose probability moved too far, and pull ratios towards 1.

    ratio  = pi / anchor
    drop   = pi - mu > delta_high    if A > 0        it already rose far enough
             pi - mu < -delta_low    if A <= 0       it already fell far enough
    loss_t = -1[not drop] * A * ratio + tau * (log pi - log anchor)^2

A large ratio of a rare token hardly changes the distribution, that of a likely token does. The
squared term also acts on dropped tokens. It is not clamped, because it has no exp.
arXiv:2602.04879 (binary total variation); the square after Kimi-K2.5, arXiv:2602.02276; together
prime-rl's default since mid-2026.
"""

from losses.tokens import TokenLoss, Tokens, ratio_to


def dppo(tokens: Tokens, *, delta_low: float, delta_high: float, tau: float) -> TokenLoss:
    """Return the loss [N]; metrics count the dropped tokens, by direction of the move."""
    ratio = ratio_to(tokens.anchor, tokens.logprobs)  # [N]
    moved = (tokens.logprobs.exp() - tokens.rollout_logprobs.exp()).detach()  # [N] in -1..1
    rises = tokens.advantages > 0  # [N]
    low, high = ~rises & (moved < -delta_low), rises & (moved > delta_high)  # [N], [N]
    keep = ~(low | high)  # [N]
    pull = tau * (tokens.logprobs - tokens.anchor).square()  # [N]
    metrics = {
        "masked_fraction": (~keep).float(),
        "masked_fraction_low": low.float(),
        "masked_fraction_high": high.float(),
    }
    return TokenLoss(pull - keep * tokens.advantages * ratio, metrics)
