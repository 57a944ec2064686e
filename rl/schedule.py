"""Schedules: numbers that change with the training step (docs/everyday.md).

A schedule is a function of the step, in a file that contains `is_schedule = True`.
"""

import math
from collections.abc import Mapping

from rl.config.ranges import PositiveInt

is_schedule = True


def linear(step: int, *, start: float, end: float, steps: PositiveInt) -> float:
    """Return a number that changes linearly from `start` at step 0 to `end` at step `steps`."""
    share = min(step / steps, 1.0)
    return (1 - share) * start + share * end


def cosine(step: int, *, start: float, end: float, steps: PositiveInt) -> float:
    """Return a number that follows half a cosine wave, from `start` at 0 to `end` at `steps`."""
    share = (1 - math.cos(math.pi * min(step / steps, 1.0))) / 2
    return (1 - share) * start + share * end


def pieces(step: int, *, values: Mapping[int, float]) -> float:
    """Return the value of the largest key <= `step`. Raise ValueError if there is no key 0."""
    if 0 not in values:
        raise ValueError("`values` has no step 0: write values={0: <first value>, ...}")
    return values[max(begin for begin in values if begin <= step)]
