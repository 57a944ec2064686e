"""The scores of a run over its steps, and numbers that summarise such a curve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from statistics import median_low
from typing import Any

import numpy as np

from lab.report.statistics import Floats


@dataclass(frozen=True, eq=False)
class Curve:
    """Scores, with the steps, seconds and tokens of the run before each of them."""

    steps: Floats
    seconds: Floats
    tokens: Floats
    scores: Floats

    def at(self, points: Any) -> "Curve":
        """Return only these points, given by index or by a mask."""
        columns = (self.steps, self.seconds, self.tokens, self.scores)
        return Curve(*(column[points] for column in columns))

    def smoothed(self, window: int) -> "Curve":
        """Return the running mean of the last `window` scores, of fewer at the beginning."""
        sums = np.concatenate([[0.0], self.scores.cumsum()])
        ends = np.arange(1, len(sums))
        starts = np.maximum(ends - window, 0)
        return replace(self, scores=(sums[ends] - sums[starts]) / (ends - starts))

    def first_reach(self, over: Floats, target: float) -> float:
        """Return the value of `over` at which the score first reaches the target, else inf."""
        reached = np.flatnonzero(self.scores >= target)
        return float(over[reached[0]]) if len(reached) else inf

    @property
    def mean_height(self) -> float:
        """The area under the curve divided by its steps; NaN for fewer than two points."""
        if len(self.steps) < 2 or self.steps[-1] <= self.steps[0]:
            return nan
        return float(np.trapezoid(self.scores, self.steps) / (self.steps[-1] - self.steps[0]))


NO_CURVE = Curve(*(np.array([], float) for _ in range(4)))


@dataclass(frozen=True)
class Efficiency:
    """What half of the runs needed to reach the baseline's final score; inf: fewer reached it.

    That score is the baseline's median run's, so half of the baseline's own runs reach it.
    """

    steps: float
    seconds: float
    tokens: float
    num_reached: int
    num_runs: int


def final_score(curves: Sequence[Curve]) -> float:
    """Return the median of the last scores, NaN if no curve has a point."""
    return float(np.median([curve.scores[-1] for curve in curves if len(curve.scores)] or [nan]))


def efficiency(curves: Sequence[Curve], target: float) -> Efficiency:
    """Return what half of these runs needed to reach the target."""
    steps, seconds, tokens = (
        [curve.first_reach(getattr(curve, name), target) for curve in curves]
        for name in ("steps", "seconds", "tokens")
    )
    return Efficiency(
        median_low(steps),
        median_low(seconds),
        median_low(tokens),
        sum(step < inf for step in steps),
        len(curves),
    )
