"""Intervals and p-values for the scores of several seeds on the same questions.

    y[s, q]      mean reward of seed s of one arm on held-out question q        [S, Q]
    score        mean of y
    difference   score(arm) - score(baseline), on the same questions

Intervals are percentiles of a bootstrap that resamples seeds and questions (Owen 2007, "The
pigeonhole bootstrap"). The draws are scaled to the variance V (Cameron, Gelbach, Miller 2011), then
by Student's quantile divided by the normal quantile (Satterthwaite 1946):

    V = sum_a A_a + C - sum_a R_a    a: the arm of a score, or both arms of a difference
    A   variance between the seeds of an arm: var_s(mean_q y) / S
    C   variance between questions: var_q(m) / Q
        m is mean_s y of the arm. For a difference, mean_s y of the baseline is subtracted
    R   variance from the noise of single rollouts, included in A and in C: var(residual) / (S Q)

docs/report.md explains this method. The seeds of an arm with fewer than FEWEST_SEEDS seeds are not
resampled. The interval of such an arm lacks the variance between seeds, so its decision is OPEN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

NUM_DRAWS = 10_000
LEVEL = 0.95  # confidence level of the bootstrap's intervals
ERROR = 0.05  # family-wise error rate, the chance of any false decision if all arms are equal
FEWEST_SEEDS = 3  # with fewer, the bootstrap does not resample the seeds of an arm
BETTER, WORSE, OPEN, BASELINE = "better", "worse", "open", "baseline"
EQUAL = "equal"  # only lab/report/sequential.py makes this decision


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval. The ends are NaN if the spread is unknown."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        end = spec.removeprefix("+")
        ends = f" [{self.low:{end}}, {self.high:{end}}]" if np.isfinite(self.low) else ""
        return f"{self.value:{spec}}{ends}"

    def __abs__(self) -> "Interval":
        """Return the interval with its sign changed if the estimate is negative."""
        return self if self.value >= 0 else Interval(-self.value, -self.high, -self.low)


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores y [S, Q] of one arm, and the environment index of each question [Q]."""

    y: Floats
    strata: NDArray[np.int64]

    @property
    def num_seeds(self) -> int:
        return len(self.y)

    def first_seeds(self, num_seeds: int) -> "Scores":
        return Scores(self.y[:num_seeds], self.strata)

    @property
    def resamples_seeds(self) -> bool:
        return self.num_seeds >= FEWEST_SEEDS

    @property
    def means(self) -> Floats:
        return self.y.mean(1)  # [S]

    @property
    def between_seeds(self) -> float:
        """Return A, the variance of the score between seeds; 0 if the seeds are not resampled."""
        return float(self.means.var(ddof=1) / self.num_seeds) if self.resamples_seeds else 0.0

    @cached_property
    def noise(self) -> float:
        """Return R, the variance from the noise of single rollouts. A and C both contain R."""
        if not self.resamples_seeds:
            return 0.0
        total = 0.0
        for y, share in _by_stratum(self.y, self.strata):
            seeds, questions = y.shape
            if questions > 1:
                residual = y - y.mean(0) - y.mean(1, keepdims=True) + y.mean()
                square = (residual**2).sum() / ((seeds - 1) * (questions - 1))
                total += share**2 * square / (seeds * questions)
        return float(total)


def _by_stratum(y: Floats, strata: NDArray[np.int64]) -> list[tuple[Floats, float]]:
    """Return for each environment its columns of `y`, and its share of the questions."""
    columns = [y[..., strata == stratum] for stratum in np.unique(strata)]
    return [(one, one.shape[-1] / len(strata)) for one in columns]


@dataclass(frozen=True)
class Spread:
    """The variance of a score or of a difference of two scores, split by source."""

    seeds: tuple[tuple[float, int], ...]  # (A, S) of each arm whose seeds are resampled
    questions: float  # C, the variance between questions
    noise: float  # the sum of R over the arms
    free_questions: int  # degrees of freedom of C: number of questions minus that of environments

    @property
    def variance(self) -> float:
        """Return the total variance V, or NaN if neither seeds nor questions allow an estimate."""
        seeds = sum(variance for variance, _ in self.seeds)
        if not self.seeds and not self.free_questions:
            return float("nan")
        # V contains A and C, so an estimate of V below A or C is due to chance.
        return max(seeds + self.questions - self.noise, seeds, self.questions)

    @property
    def standard_error(self) -> float:
        return float(np.sqrt(self.variance))

    @property
    def degrees_of_freedom(self) -> float:
        """Return the degrees of freedom of V for intervals, by Satterthwaite's formula.

        A and C both contain the noise R. To count R once, the seeds' term is scaled by (V - C) / A.
        """
        total = sum(variance for variance, _ in self.seeds)
        return self._degrees_of_freedom((self.variance - self.questions) / total if total else 0.0)

    @property
    def decision_degrees_of_freedom(self) -> float:
        """Return the degrees of freedom of V for decisions. The seeds' term is not scaled.

        Among many arms, the seeds of a few have similar scores by chance, so their differences look
        too certain. In sweeps of 12 equal arms, decisions with `degrees_of_freedom` name a false
        winner in 1 of 8 sweeps, decisions with this property in 1 of 30.
        """
        return self._degrees_of_freedom(1.0)

    def _degrees_of_freedom(self, seeds_factor: float) -> float:
        terms = sum(seeds_factor * variance**2 / (seeds - 1) for variance, seeds in self.seeds)
        terms += self.questions**2 / max(self.free_questions, 1)
        return float(self.variance**2 / terms) if terms else float("inf")

    def with_seeds(self, num_seeds: int) -> "Spread":
        """Return the spread that is expected with `num_seeds` seeds in each arm."""
        seeds = tuple((variance * old / num_seeds, num_seeds) for variance, old in self.seeds)
        # C - R is the variance between questions without noise. More seeds do not reduce it.
        questions = max(self.questions - self.noise, 0.0)
        return Spread(seeds, questions, 0.0, self.free_questions)


def spread_of(arm: Scores, baseline: Scores | None = None) -> Spread:
    """Return the spread of an arm's score, or of the difference to the baseline's score."""
    arms = [arm] if baseline is None else [arm, baseline]
    means = arm.y.mean(0) if baseline is None else arm.y.mean(0) - baseline.y.mean(0)
    questions = sum(
        share**2 * one.var(ddof=1) / len(one)
        for one, share in _by_stratum(means, arm.strata)
        if len(one) > 1
    )
    seeds = tuple((one.between_seeds, one.num_seeds) for one in arms if one.resamples_seeds)
    free = len(means) - len(np.unique(arm.strata))
    return Spread(seeds, float(questions), sum(one.noise for one in arms), free)


def question_weights(
    strata: NDArray[np.int64], rng: np.random.Generator, num_draws: int = NUM_DRAWS
) -> Floats:
    """Return the weight of each question in each draw [D, Q]. Each row sums to 1."""
    weights = np.empty((num_draws, len(strata)))
    for stratum in np.unique(strata):
        chosen = np.flatnonzero(strata == stratum)
        weights[:, chosen] = _multinomial_counts(len(chosen), rng, num_draws)
    return weights / len(strata)


def seed_weights(num_seeds: int, rng: np.random.Generator, num_draws: int = NUM_DRAWS) -> Floats:
    """Return the weight of each seed in each draw [D, S]. Each row sums to 1."""
    if num_seeds < FEWEST_SEEDS:
        return np.full((num_draws, num_seeds), 1 / num_seeds)
    return _multinomial_counts(num_seeds, rng, num_draws) / num_seeds


def _multinomial_counts(size: int, rng: np.random.Generator, num_draws: int) -> Floats:
    return rng.multinomial(size, np.full(size, 1 / size), num_draws).astype(float)


def draw_scores(scores: Scores, seeds: Floats, questions: Floats) -> Floats:
    """Return the score in each draw [D] from the weights `seeds` [D, S] and `questions` [D, Q]."""
    return ((seeds @ scores.y) * questions).sum(1)


def interval(value: float, draws: Floats, spread: Spread) -> Interval:
    """Return `value` with its interval: percentiles of the draws after scaling to `spread`."""
    error, drawn = spread.standard_error, float(draws.std())
    if np.isnan(error):
        return Interval(value, float("nan"), float("nan"))
    tail = (1 + LEVEL) / 2
    stretch = error / drawn if drawn else 0.0
    stretch *= student_quantile(spread.degrees_of_freedom, tail) / student_quantile(np.inf, tail)
    low, high = np.quantile(value + (draws - draws.mean()) * stretch, [1 - tail, tail])
    return Interval(value, float(low), float(high))


def p_value(difference: float, spread: Spread) -> float:
    """Return the two-sided p-value of a difference by Student's t, NaN if V is unknown."""
    from scipy.special import stdtr

    if np.isnan(spread.standard_error):
        return float("nan")
    if spread.standard_error == 0:
        return 1.0 if difference == 0 else 0.0
    t = abs(difference) / spread.standard_error
    return float(2 * stdtr(spread.decision_degrees_of_freedom, -t))


def looks_factor(num_looks: int) -> int:
    """Return the factor that multiplies the p-values of look number `num_looks` at a sweep.

    A look is the first judgement of a sweep, or a later one after the sweep has grown. Look 1 has
    the error level ERROR. Look k > 1 has the level ERROR / (k (k + 1)). The levels of all looks
    k > 1 add up to ERROR / 2 at most.
    """
    return num_looks * (num_looks + 1) if num_looks > 1 else 1


def student_quantile(degrees_of_freedom: Any, probability: float) -> Any:
    """Return a quantile of Student's t. Infinite degrees of freedom give the normal quantile."""
    from scipy.special import ndtri, stdtrit

    degrees_of_freedom = np.asarray(degrees_of_freedom, float)
    limited = stdtrit(np.minimum(degrees_of_freedom, 1e6), probability)
    return np.where(np.isinf(degrees_of_freedom), ndtri(probability), limited)[()]


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for multiple tests (Holm 1979). NaN stays NaN."""
    known = sorted((p, index) for index, p in enumerate(p_values) if not np.isnan(p))
    adjusted, highest = list(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted


def decide(difference: Interval, adjusted_p: float) -> str:
    """Return BETTER or WORSE if p < ERROR and the interval excludes 0 or is NaN, else OPEN."""
    if not adjusted_p < ERROR or difference.low <= 0 <= difference.high:
        return OPEN
    return BETTER if difference.value > 0 else WORSE


def chance_better(arm: Floats, baseline: Floats) -> float:
    """Return the share of seed pairs in which `arm` [S] beats `baseline` [T]. A tie counts half."""
    pairs = arm[:, None] - baseline[None, :]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def interquartile_mean(values: Floats) -> Any:
    """Return the mean without the lowest and the highest quarter, along the last axis."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def interquartile_interval(scores: Scores, rng: np.random.Generator) -> Interval:
    """Return the interquartile mean over environments and seeds, with its interval.

    Seeds are resampled separately in each environment. The ends of the interval are percentiles of
    the draws, which are not scaled to V (Agarwal et al. 2021).
    """
    means = np.stack([one.mean(1) for one, _ in _by_stratum(scores.y, scores.strata)])  # [E, S]
    value = float(interquartile_mean(means.ravel()))
    if not scores.resamples_seeds:
        return Interval(value, float("nan"), float("nan"))
    chosen = rng.integers(scores.num_seeds, size=(NUM_DRAWS, *means.shape))
    drawn = np.take_along_axis(means[None], chosen, 2).reshape(NUM_DRAWS, -1)
    low, high = np.quantile(interquartile_mean(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))
