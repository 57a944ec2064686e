"""The credit of rollouts that a token limit cut off. No torch.

    keep           nothing changes: the reward it got, all its tokens
    mask           no token counts; the reward stays in the group's baseline
    zero_reward    reward 0
    mask_zero      both: no token counts, and its reward in the baseline is 0
    penalty        reward - weight * (length - onset) / (limit - onset), onset <= length <= limit;
                   length is that of the longest turn, limit is the token limit of a turn
    drop           no token counts, and the group's baseline leaves the rollout out

The stop reason decides which rollouts were cut off: a turn reached its token limit, or the episode
filled the context. Only `penalty` depends on the length, because it acts before the limit is
reached. The limit is that of one turn, so many short turns have no penalty.
"""

from dataclasses import replace

from rl.config.ranges import BelowOne, NonNegativeFloat, PositiveInt
from rl.records import Credit, Rollout


def keep(rollout: Rollout) -> Credit:
    """Return the credit of a rollout that was not cut off."""
    return Credit(rollout.reward)


def mask(rollout: Rollout) -> Credit:
    """Train on no token of a rollout that was cut off; still compare the others with it."""
    return Credit(rollout.reward, trains=not rollout.stop_reason.truncated)


def zero_reward(rollout: Rollout) -> Credit:
    """Give a rollout that was cut off the reward 0."""
    cut = rollout.stop_reason.truncated and rollout.reward is not None
    return Credit(0.0 if cut else rollout.reward)


def mask_zero(rollout: Rollout) -> Credit:
    """Train on no token of a rollout that was cut off; compare the others with reward 0."""
    return replace(mask(rollout), reward=zero_reward(rollout).reward)


def penalty(
    rollout: Rollout, *, limit: PositiveInt | None, start: BelowOne, weight: NonNegativeFloat
) -> Credit:
    """Return the credit with the soft overlong punishment of DAPO, arXiv:2503.14476, eq. 13.

    Args:
        rollout: any.
        limit: tokens of a single turn at which the penalty is full; None: the token limit that the
            sampler or the environment gave the turns. Without a limit there is no penalty.
        start: share of the limit up to which there is no penalty, below 1.
        weight: the full penalty.

    """
    most = rollout.turn_limit if limit is None else limit
    if rollout.reward is None or most is None:
        return Credit(rollout.reward)
    onset = start * most
    over = (max(rollout.turn_lengths, default=0) - onset) / (most - onset)
    return Credit(rollout.reward - weight * min(max(over, 0.0), 1.0))


def drop(rollout: Rollout) -> Credit:
    """Treat a rollout that was cut off as if it had never been sampled."""
    return Credit(None, trains=False) if rollout.stop_reason.truncated else keep(rollout)
