"""GSPO: PPO's clipped surrogate on the sequence's geometric mean ratio.

    ratio_i = exp(mean over the tokens of i of (log pi - log anchor))    anchor: losses/tokens.py
    loss_t  = max(-A * ratio_i, -A * clip(ratio_i, 1 - clip_low, 1 + clip_high))   for every t of i

All tokens of a sequence share ratio_i and its gradient, so a sequence is kept or clipped whole.
ratio_i differs from 1 far less than a token's ratio, so clip_low and clip_high are usually < 1e-3.
GSPO needs aggregation=sequence_mean, because with token_mean long sequences would count more. All
tokens of a sequence must be in one micro-batch. The mean log ratio is clamped, not the log ratio of
each token. Qwen, arXiv:2507.18071.
"""

import torch

from losses.tokens import MAX_LOG_RATIO, TokenLoss, Tokens, is_clamped, mean_per_sequence

PER_SEQUENCE = True  # makes rl/config/algorithm_rules.py require aggregation=sequence_mean


def gspo(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return the clipped surrogate [N]. Metrics [N] are 1 where a bound clips the sequence."""
    advantages = tokens.advantages
    difference = tokens.logprobs - tokens.anchor  # [N]
    mean = mean_per_sequence(difference, tokens.sequence_ids, tokens.num_sequences)  # [S]
    ratio_per_sequence = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()  # [S]
    ratio = ratio_per_sequence[tokens.sequence_ids]  # [N]
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)  # [N]
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)  # [N]
    low = (advantages < 0) & (ratio < 1 - clip_low)  # [N]
    high = (advantages > 0) & (ratio > 1 + clip_high)  # [N]
    metrics = {
        "clip_fraction": (low | high).float(),
        "clip_fraction_low": low.float(),
        "clip_fraction_high": high.float(),
    }
    return TokenLoss(loss, metrics, is_clamped(mean)[tokens.sequence_ids])
