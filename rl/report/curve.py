"""A score over the course of a run, and what one number says about it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from statistics import median_low
from typing import Any

import numpy as np

from rl.report.statistics import Floats


@dataclass(frozen=True, eq=False)
class Curve:
    """A score at each point of a run, and how far the run was there, by three measures."""

    steps: Floats
    seconds: Floats
    tokens: Floats
    scores: Floats

    def at(self, points: Any) -> "Curve":
        """Only these points: their numbers, or whether each is one."""
        columns = (self.steps, self.seconds, self.tokens, self.scores)
        return Curve(*(column[points] for column in columns))

    def smoothed(self, window: int) -> "Curve":
        """Each score as the mean of the last `window`, of fewer at the beginning."""
        sums = np.concatenate([[0.0], self.scores.cumsum()])
        ends = np.arange(1, len(sums))
        starts = np.maximum(ends - window, 0)
        return replace(self, scores=(sums[ends] - sums[starts]) / (ends - starts))

    def first_reach(self, over: Floats, target: float) -> float:
        """Where, `over` its steps, seconds or tokens, it first has the target; inf: nowhere."""
        reached = np.flatnonzero(self.scores >= target)
        return float(over[reached[0]]) if len(reached) else inf

    @property
    def mean_height(self) -> float:
        """The area under it a step; NaN for fewer than two points."""
        if len(self.steps) < 2 or self.steps[-1] <= self.steps[0]:
            return nan
        return float(np.trapezoid(self.scores, self.steps) / (self.steps[-1] - self.steps[0]))


@dataclass(frozen=True)
class Efficiency:
    """What it took half of the runs to reach the baseline's final score; inf: fewer reached it.

    That score is the median run's, so half of the baseline's own runs do.
    """

    steps: float
    seconds: float
    tokens: float
    num_reached: int
    num_runs: int


def final_score(curves: Sequence[Curve]) -> float:
    """The median of where they end; NaN where none has a point."""
    return float(np.median([curve.scores[-1] for curve in curves if len(curve.scores)] or [nan]))


def efficiency(curves: Sequence[Curve], target: float) -> Efficiency:
    """What it took them to reach a score."""
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
