"""Batch credits: functions that read all groups of a batch and change the credits of rollouts.

group -> credits (credit.py) -> buffer -> batch of groups -> batch credit -> plan (plan.py)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from losses.groups import SPREAD_TOLERANCE
from rl.records import Credit, Group
from rl.runtime.failure import RunFailed

BatchCredit = Callable[[Sequence[Group]], Sequence[Sequence[Credit]]]
"""groups of a batch -> the new credits of each group's rollouts"""


def none(groups: Sequence[Group]) -> list[tuple[Credit, ...]]:
    """Return the credits unchanged."""
    return [group.credits for group in groups]


def whiten(groups: Sequence[Group]) -> list[tuple[Credit, ...]]:
    """Return credits with the advantages (A - mean) / std of the whole batch (docs/losses.md).

    Mean and std (with Bessel's correction) are those of all advantages A of trained rollouts with a
    reward. If there are fewer than two such advantages, or if they differ by at most 1e-6, the new
    advantages are 0. Credits without a reward do not change.
    """
    credits = [credit for group in groups for credit in group.credits]
    trained = [credit for credit in credits if credit.trains and credit.reward is not None]
    counted = [number for credit in trained for number in credit.advantages]
    mean = math.fsum(counted) / max(len(counted), 1)
    # A mean that is only a rounding error counts as 0, because it would add noise to the gradient.
    mean = 0.0 if abs(mean) <= SPREAD_TOLERANCE else mean
    variance = math.fsum((number - mean) ** 2 for number in counted) / max(len(counted) - 1, 1)
    is_flat = max(counted, default=0.0) - min(counted, default=0.0) <= SPREAD_TOLERANCE
    scale = 0.0 if is_flat else 1 / math.sqrt(variance)

    def whiten_credit(credit: Credit) -> Credit:
        if credit.reward is None:
            return credit
        return replace(credit, advantages=tuple((a - mean) * scale for a in credit.advantages))

    return [tuple(map(whiten_credit, group.credits)) for group in groups]


def apply_batch_credit(groups: Sequence[Group], batch_credit: BatchCredit) -> list[Group]:
    credits = [tuple(each) for each in batch_credit(groups)]
    found, expected = (
        [[len(credit.advantages) for credit in each] for each in credits_by_group]
        for credits_by_group in (credits, [group.credits for group in groups])
    )
    if found != expected:
        raise RunFailed(
            "the batch credit changed the number of advantages per rollout (one list per group) "
            f"from {expected} to {found}: return as many advantages for each rollout as before"
        )
    return [replace(group, credits=each) for group, each in zip(groups, credits, strict=True)]
