"""The credit of rollouts that a token limit cut off.

    keep           the rollout keeps its reward, and its tokens are trained
    mask           no token is trained; the reward stays in the group's baseline
    zero_reward    the reward is 0
    mask_zero      no token is trained; the reward in the group's baseline is 0
    penalty        the reward is reward - weight * clip((length - onset) / (limit - onset), 0, 1)
                   length: tokens of the longest turn, limit: turn limit, onset: start * limit
    drop           no token is trained, and the group's baseline excludes the rollout

A rollout is cut off if, by its stop reason, a turn reached its token limit or the episode filled
the context. `penalty` reads the length and not the stop reason, because its penalty starts below
the limit. The limit applies to one turn, so many short turns have no penalty.
"""

from dataclasses import replace

from rl.config.ranges import BelowOne, NonNegativeFloat, PositiveInt
from rl.records import Credit, Rollout


def keep(rollout: Rollout) -> Credit:
    """Return a credit with the rollout's reward, even if the rollout was cut off."""
    return Credit(rollout.reward)


def mask(rollout: Rollout) -> Credit:
    """Exclude the tokens of a cut-off rollout from training; keep its reward in the baseline."""
    return Credit(rollout.reward, trains=not rollout.stop_reason.truncated)


def zero_reward(rollout: Rollout) -> Credit:
    """Set the reward of a cut-off rollout to 0."""
    cut = rollout.stop_reason.truncated and rollout.reward is not None
    return Credit(0.0, is_zeroed=True) if cut else keep(rollout)


def mask_zero(rollout: Rollout) -> Credit:
    """Exclude the tokens of a cut-off rollout from training; use reward 0 in the baseline."""
    return replace(zero_reward(rollout), trains=mask(rollout).trains)


def penalty(
    rollout: Rollout, *, limit: PositiveInt | None, start: BelowOne, weight: NonNegativeFloat
) -> Credit:
    """Return the credit with the soft overlong punishment of DAPO, arXiv:2503.14476, eq. 13.

    Without `limit`, use the limit of the sampler or environment. Without any limit, do not punish.
    """
    limit = rollout.turn_limit if limit is None else limit
    if rollout.reward is None or limit is None:
        return Credit(rollout.reward)
    onset = start * limit
    over = (max(rollout.turn_lengths, default=0) - onset) / (limit - onset)
    return Credit(rollout.reward - weight * min(max(over, 0.0), 1.0))


def drop(rollout: Rollout) -> Credit:
    """Exclude a cut-off rollout from training and from the group's baseline."""
    return Credit(None, trains=False) if rollout.stop_reason.truncated else keep(rollout)
