"""DPPO: drop tokens whose probability moved too far, and pull ratios towards 1.

    ratio  = pi / anchor             pi, mu, anchor: losses/tokens.py, A: advantage
    drop   = pi - mu > delta_high    if A > 0        the probability already rose enough
             pi - mu < -delta_low    if A <= 0       the probability already fell enough
    loss_t = -1[not drop] * A * ratio + tau * (log pi - log anchor)^2

A large ratio of a rare token hardly changes the distribution, but a large ratio of a likely token
does. So the difference pi - mu decides which tokens are dropped, not the ratio. The squared term
also acts on dropped tokens. It needs no clamp, because it has no exponential. The drop is from
arXiv:2602.04879 (binary total variation), and the squared term is from Kimi-K2.5, arXiv:2602.02276.
prime-rl has used both by default since mid-2026.
"""

from losses.tokens import TokenLoss, Tokens, ratio_to


def dppo(tokens: Tokens, *, delta_low: float, delta_high: float, tau: float) -> TokenLoss:
    """Return the loss [N]. Metrics mark tokens dropped because pi fell (low) or rose (high)."""
    ratio = ratio_to(tokens.anchor, tokens.logprobs)  # [N]
    moved = (tokens.logprobs.exp() - tokens.rollout_logprobs.exp()).detach()  # [N] pi - mu
    rises = tokens.advantages > 0  # [N]
    low, high = ~rises & (moved < -delta_low), rises & (moved > delta_high)  # [N], [N]
    keep = ~(low | high)  # [N]
    pull = tau * (tokens.logprobs - tokens.anchor).square()  # [N]
    metrics = {
        "masked_fraction": (~keep).float(),
        "masked_fraction_low": low.float(),
        "masked_fraction_high": high.float(),
    }
    loss = pull - keep * tokens.advantages * ratio  # [N]
    return TokenLoss(loss, metrics, tokens.ratio_clamped)
