"""What becomes of rollouts that were cut off in mid-sentence. No torch.

    keep           nothing: the reward it got, all its tokens
    mask           no token counts; the reward stays in the group's baseline
    zero_reward    reward 0
    mask_zero      both: no token counts, and the baseline knows it as 0
    penalty        reward - weight * (length - onset) / (limit - onset), onset <= length <= limit,
                   length being that of the longest turn, limit what the sampler gave a turn
    drop           no token counts, and the group's baseline does not know of it

Which rollouts those are is decided by the typed stop reason (a turn reached its token limit, or the
episode the context), not by looking at tokens; only `penalty` goes by length, for it warns before
the limit is reached. That limit is one of a turn: an episode of many short ones is no overlong one.
"""

from dataclasses import dataclass, replace

from rl.records import Rollout

NEUTRAL = ("keep",)  # does nothing to what was cut off
LOWERS_REWARDS = ("penalty",)
CHANGES_REWARDS = ("penalty", "zero_reward", "mask_zero")


@dataclass(frozen=True)
class Standing:
    """A rollout's reward after truncation, and whether it trains."""

    reward: float | None
    trains: bool = True


def keep(rollout: Rollout) -> Standing:
    """As if nothing had been cut off."""
    return Standing(rollout.reward)


def mask(rollout: Rollout) -> Standing:
    """No lesson from what was cut off; the others are still compared with it."""
    return Standing(rollout.reward, trains=not rollout.stop_reason.truncated)


def zero_reward(rollout: Rollout) -> Standing:
    """Reward 0, whatever the environment said."""
    cut = rollout.stop_reason.truncated and rollout.reward is not None
    return Standing(0.0 if cut else rollout.reward)


def mask_zero(rollout: Rollout) -> Standing:
    """No lesson from what was cut off; the others are compared with it as if it had failed."""
    return replace(mask(rollout), reward=zero_reward(rollout).reward)


def penalty(rollout: Rollout, *, limit: int | None, start: float, weight: float) -> Standing:
    """Soft overlong punishment. DAPO, arXiv:2503.14476, eq. 13.

    Args:
        rollout: any.
        limit: tokens of a single turn at which the penalty is full; None: those that it could have,
            of which each environment of a mixture may say another number. Without any limit
            nothing is too long.
        start: share of the limit up to which there is none, below 1.
        weight: the full penalty.

    """
    most = rollout.turn_limit if limit is None else limit
    if rollout.reward is None or most is None:
        return Standing(rollout.reward)
    onset = start * most
    over = (max(rollout.turn_lengths, default=0) - onset) / (most - onset)
    return Standing(rollout.reward - weight * min(max(over, 0.0), 1.0))


def drop(rollout: Rollout) -> Standing:
    """As if it had never been sampled."""
    return Standing(None, trains=False) if rollout.stop_reason.truncated else keep(rollout)
