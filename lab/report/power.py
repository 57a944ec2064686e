"""Compute the smallest visible difference, and the seeds that an observed difference needs."""

from bisect import bisect_left
from collections.abc import Callable
from math import inf

from lab.report.statistics import ERROR, FEWEST_SEEDS, Spread, student_quantile

POWER = 0.8  # probability of detecting the smallest visible difference
MOST_SEEDS = 1000  # a larger number of seeds is shown as "> 1,000"
_LARGEST_COUNT = 10**7  # if this many seeds do not suffice, no number of seeds does


def visible_difference(spread: Spread, factor: int = 1) -> float:
    """Return the difference that is detected with probability POWER. `factor` scales p-values."""
    tail = 1 - ERROR / 2 / factor
    num_standard_errors = sum(
        student_quantile(spread.decision_degrees_of_freedom, share) for share in (tail, POWER)
    )
    return spread.standard_error * float(num_standard_errors)


def seeds_needed(difference: float, spread: Spread, factor: int = 1) -> float | None:
    """Return the seeds per arm that detect this true difference with probability POWER.

    Return infinity if no number of seeds suffices, so that only more questions help. Return None if
    the number is unknown, or if the difference is 0.
    """
    if len(spread.seeds) < 2 or not difference:
        return None
    return fewest_seeds(
        lambda count: visible_difference(spread.with_seeds(count), factor) <= abs(difference)
    )


def fewest_seeds(suffices: Callable[[int], bool]) -> float:
    """Return the smallest number of seeds per arm that suffices, or infinity if none does."""
    counts = range(FEWEST_SEEDS, _LARGEST_COUNT)
    index = bisect_left(counts, True, key=suffices)
    return float(counts[index]) if index < len(counts) else inf
