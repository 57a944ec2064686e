"""A score over the course of a run, and what one number says about it."""

from dataclasses import dataclass, replace
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
        return float(over[reached[0]]) if len(reached) else float("inf")

    @property
    def mean_height(self) -> float:
        """The area under it a step; NaN for fewer than two points."""
        if len(self.steps) < 2 or self.steps[-1] <= self.steps[0]:
            return float("nan")
        return float(np.trapezoid(self.scores, self.steps) / (self.steps[-1] - self.steps[0]))
