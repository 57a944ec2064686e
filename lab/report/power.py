"""Compute which differences are visible, and how many seeds make a difference visible.

A difference is detected if its p-value is below ERROR. A true difference is visible if it is
detected with probability POWER or more.
"""

from bisect import bisect_left
from collections.abc import Callable
from math import inf

from lab.report.statistics import ERROR, FEWEST_SEEDS, Spread, student_quantile

POWER = 0.8  # the smallest visible difference is detected with this probability
MOST_SEEDS = 1000  # the report shows a larger number of seeds as "> 1,000"
_LARGEST_COUNT = 10**7  # fewest_seeds returns infinity if this many or more are needed


def visible_difference(spread: Spread, factor: int = 1) -> float:
    """Return the smallest visible difference if p-values are multiplied by `factor`."""
    tail = 1 - ERROR / 2 / factor
    num_standard_errors = sum(
        student_quantile(spread.decision_degrees_of_freedom, share) for share in (tail, POWER)
    )
    return spread.standard_error * float(num_standard_errors)


def seeds_needed(difference: float, spread: Spread, factor: int = 1) -> float | None:
    """Return how many seeds per arm detect a true `difference` with probability POWER.

    Return infinity if no number of seeds suffices. Then only more questions help. Return None if
    the difference is 0, or if an arm has too few seeds to estimate its variance between seeds.
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
