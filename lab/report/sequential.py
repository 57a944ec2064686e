"""Decide after each seed if an arm is better than, worse than or equal to the baseline.

    d_k, V_k    difference to the baseline after k seeds, and its variance (statistics.py)
    interval    d_k +- (delta / 2 + V_k log(2 / alpha) / delta)     delta: the smallest effect
    alpha       ERROR (statistics.py) divided by the number of open arms, as in Holm's test (1979)

An arm may be judged after every seed. Each judgement is called a look. The first decision about an
arm is final. An arm without a decision is open. docs/report.md has the rule.

If d_k is normal and V_k is known, the probability is at least 1 - alpha that all of the infinitely
many intervals contain the true difference. The mean over k seeds includes the first j < k seeds,
and both means use the same questions, so cov(d_j, d_k) = V_k for j < k. Therefore d_k / V_k is a
Brownian motion with drift in the time 1 / V_k. Its noise crosses the line a + b / V_k with
probability exp(-2 a b) at most (Robbins and Siegmund 1970; Howard, Ramdas, McAuliffe and Sekhon
2020). With a = log(2 / alpha) / delta and b = delta / 2 this is Wald's test (1945) of 0 against
+- delta. Enough seeds and questions decide every true difference except +- delta / 2.

The hypotheses difference = 0 and |difference| >= delta exclude each other, so each arm counts as
one test. The chance of any false decision about any arm is therefore ERROR at most.

V_k is estimated, so the interval uses Student's t: its half width has the tail probability under t
that the formula's half width has under a normal d_k. Few seeds cannot estimate very small tails, so
a lower tail probability is raised to alpha / (10 k (k + 1)). This adds at most alpha / 30 to the
chance of a false decision. benchmarks/sequential.py measures this chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from lab.report import statistics as st
from lab.report.power import fewest_seeds


@dataclass(frozen=True)
class State:
    """The state of an arm at the look that decided it, or at the last look if it is open."""

    difference: st.Interval
    smallest_effect: float
    error: float = st.ERROR  # alpha
    decision: str = st.OPEN
    spread: st.Spread | None = None  # None before the first look
    p_value: float = nan  # NaN for the decisions of this file, which use no p-value

    @property
    def seeds_needed(self) -> float | None:
        """Return the number of seeds per arm that is likely to decide an open arm.

        Return None before the first look and after a decision, inf if no number suffices. The true
        difference is assumed to be the observed one, or 0 if the observed one is below the smallest
        effect. A true difference near half of the smallest effect needs more seeds.
        """
        if self.spread is None or self.decision != st.OPEN:
            return None
        spread, others = self.spread, (self.smallest_effect, self.error)
        width = max(abs(self.difference.value), self.smallest_effect)
        return fewest_seeds(lambda count: radius_of(spread.with_seeds(count), *others) <= width)


def radius(
    variance: Any, degrees_of_freedom: Any, num_seeds: int, smallest_effect: float, error: Any
) -> Any:
    """Return half the width of the interval after `num_seeds` seeds, elementwise for arrays."""
    from scipy.special import ndtr

    deviation = np.maximum(np.sqrt(variance), 1e-12)
    normal = smallest_effect / 2 + deviation**2 * np.log(2 / error) / smallest_effect
    level = np.maximum(ndtr(-normal / deviation), error / (20 * num_seeds * (num_seeds + 1)))
    return -st.student_quantile(degrees_of_freedom, level) * deviation


def radius_of(spread: st.Spread, smallest_effect: float, error: float) -> float:
    num_seeds = min(number for _, number in spread.seeds)
    freedom = spread.decision_degrees_of_freedom
    return float(radius(spread.variance, freedom, num_seeds, smallest_effect, error))


def decision_of(low: Any, high: Any, smallest_effect: float) -> Any:
    """Return the decision for the interval from `low` to `high`, elementwise for arrays."""
    is_equal = (low >= -smallest_effect) & (high <= smallest_effect)
    return np.select([is_equal, low > 0, high < 0], [st.EQUAL, st.BETTER, st.WORSE], st.OPEN)


def decide_arms(
    scores: Sequence[st.Scores], baseline: int, smallest_effect: float, num_unscored: int = 0
) -> list[State]:
    """Return the state of each arm, compared after every seed with `scores[baseline]`.

    `num_unscored`: number of arms that have no scores yet. They count as open arms.
    """
    gains = [float(one.y.mean() - scores[baseline].y.mean()) for one in scores]
    states = [State(st.Interval(gain, nan, nan), smallest_effect) for gain in gains]
    is_open = [i for i in range(len(scores)) if i != baseline]
    num_looks = max(one.num_seeds for one in scores) if scores[baseline].resamples_seeds else 0
    for count in range(st.FEWEST_SEEDS, num_looks + 1):
        base, num_open = scores[baseline].first_seeds(count), 0
        first = [(i, scores[i].first_seeds(count)) for i in is_open if scores[i].resamples_seeds]
        looks = [
            (i, float(one.y.mean() - base.y.mean()), st.spread_of(one, base)) for i, one in first
        ]
        # Each decision raises the other open arms' share of ERROR, so judge them again.
        while num_open != len(is_open):
            num_open = len(is_open)
            for i, gain, spread in looks:
                if i in is_open:
                    error = st.ERROR / (num_open + num_unscored)
                    half = radius_of(spread, smallest_effect, error)
                    interval = st.Interval(gain, gain - half, gain + half)
                    decision = str(decision_of(interval.low, interval.high, smallest_effect))
                    states[i] = State(interval, smallest_effect, error, decision, spread)
            is_open = [i for i in is_open if states[i].decision == st.OPEN]
    return states
