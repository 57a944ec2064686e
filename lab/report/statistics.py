"""Intervals and p-values for the scores of several seeds on the same questions.

    y[s, q]   mean reward of seed s of one arm on held-out question q        [S, Q]
    score     mean of y;  difference = score(arm) - score(baseline), paired in q

Intervals are percentiles of a two-way bootstrap: seeds are drawn within each arm; questions are
drawn once for all arms, within their environment. The spread of these draws is biased in two ways.
The noise of single rollouts enters up to three times (Owen 2007, "The pigeonhole bootstrap"), and n
seeds drawn from n vary less than new seeds. So the draws are stretched about the estimate to the
spread of

    V = sum_a A_a + C - sum_a R_a     A  between the seeds of an arm: var_s(mean_q y) / S
                                      C  between questions: var_q(mean_s y, or its difference) / Q
                                      R  noise that is in both: var(residual) / (S Q)

(two-way clustering: Cameron, Gelbach, Miller 2011), times t / z for its degrees of freedom
(Satterthwaite 1946). With fewer than FEWEST_SEEDS seeds in an arm its seeds are taken as given.
Such an interval does not know how much seeds differ, so the arm cannot be called better or worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

NUM_DRAWS = 10_000
LEVEL = 0.95  # of every interval
ERROR = 0.05  # share of sweeps of equal arms in which some arm may be called better or worse
POWER = 0.8  # chance that a true difference of the smallest visible size is found
FEWEST_SEEDS = 3  # to be resampled
MOST_SEEDS = 1000  # that a report recommends
BETTER, WORSE, UNCLEAR, BASELINE = "better", "worse", "cannot tell", "baseline"


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval; the ends are NaN if its spread is unknown."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Return the estimate, and its interval if that is known: 0.512 [0.500, 0.524]."""
        ends = f" [{self.low:{spec}}, {self.high:{spec}}]" if np.isfinite(self.low) else ""
        return f"{self.value:{spec}}{ends}"

    def __abs__(self) -> "Interval":
        """Return the interval of the difference in the direction in which it is positive."""
        return self if self.value >= 0 else Interval(-self.value, -self.high, -self.low)

    def excludes(self, value: float) -> bool:
        """Return whether the value lies outside; False if the ends are unknown."""
        return bool(self.low > value or self.high < value)


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one arm: y [S, Q], and the number of each question's environment [Q]."""

    y: Floats
    strata: NDArray[np.int64]

    @property
    def num_seeds(self) -> int:
        """The number of seeds S."""
        return len(self.y)

    @property
    def resamples_seeds(self) -> bool:
        """Whether there are enough seeds to estimate how much they differ."""
        return self.num_seeds >= FEWEST_SEEDS

    @property
    def runs(self) -> Floats:
        """The score of each seed [S]."""
        return self.y.mean(1)

    @property
    def between_seeds(self) -> float:
        """A: the variance of the score from its seeds; 0 if they are taken as given."""
        return float(self.runs.var(ddof=1) / self.num_seeds) if self.resamples_seeds else 0.0

    @cached_property
    def noise(self) -> float:
        """R: the variance from the noise of single rollouts, which A and C both contain."""
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
    """Return the columns of each environment, and its share of all questions."""
    columns = [y[..., strata == stratum] for stratum in np.unique(strata)]
    return [(one, one.shape[-1] / len(strata)) for one in columns]


@dataclass(frozen=True)
class Spread:
    """The variance of a score, or of a difference of two scores, by its source."""

    seeds: tuple[tuple[float, int], ...]  # (A, S) of each arm whose seeds are resampled
    questions: float  # C
    noise: float  # R
    free_questions: int  # degrees of freedom of C: all questions but one per environment

    @property
    def variance(self) -> float:
        """V; NaN if it can be estimated neither from seeds nor from questions."""
        seeds = sum(variance for variance, _ in self.seeds)
        if not self.seeds and not self.free_questions:
            return float("nan")
        # V contains A and C, so only chance can make its estimate smaller than either.
        return max(seeds + self.questions - self.noise, seeds, self.questions)

    @property
    def standard_error(self) -> float:
        """The square root of V."""
        return float(np.sqrt(self.variance))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of V, in which A counts by the share of V that is not C."""
        total = sum(variance for variance, _ in self.seeds)
        return self._freedom((self.variance - self.questions) / total if total else 0.0)

    @property
    def cautious_freedom(self) -> float:
        """Degrees of freedom for decisions, in which A counts in full.

        Among many arms, the few seeds of some arms are alike by chance. With `freedom`, one in
        eight sweeps of twelve equal arms would name a winner; with this, one in thirty.
        """
        return self._freedom(1.0)

    def _freedom(self, share: float) -> float:
        terms = sum(share * variance**2 / (seeds - 1) for variance, seeds in self.seeds)
        terms += self.questions**2 / max(self.free_questions, 1)
        return float(self.variance**2 / terms) if terms else float("inf")

    def with_seeds(self, num_seeds: int) -> "Spread":
        """Return the spread to expect with this number of seeds in each arm."""
        seeds = tuple((variance * old / num_seeds, num_seeds) for variance, old in self.seeds)
        questions = max(self.questions - self.noise, 0.0)  # more seeds do not reduce it
        return Spread(seeds, questions, 0.0, self.free_questions)


def spread_of(arm: Scores, baseline: Scores | None = None) -> Spread:
    """Return the spread of an arm's score, or of its difference to the baseline's."""
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
    """Return the weight of each question in each draw [D, Q]; the sum of a row is 1."""
    weights = np.empty((num_draws, len(strata)))
    for stratum in np.unique(strata):
        chosen = np.flatnonzero(strata == stratum)
        weights[:, chosen] = _multinomial(len(chosen), rng, num_draws)
    return weights / len(strata)


def seed_weights(num_seeds: int, rng: np.random.Generator, num_draws: int = NUM_DRAWS) -> Floats:
    """Return the weight of each seed in each draw [D, S]; the sum of a row is 1."""
    if num_seeds < FEWEST_SEEDS:
        return np.full((num_draws, num_seeds), 1 / num_seeds)
    return _multinomial(num_seeds, rng, num_draws) / num_seeds


def _multinomial(size: int, rng: np.random.Generator, num_draws: int) -> Floats:
    return rng.multinomial(size, np.full(size, 1 / size), num_draws).astype(float)


def draw_scores(scores: Scores, seeds: Floats, questions: Floats) -> Floats:
    """Return the arm's score in each draw [D] of the plain two-way bootstrap."""
    return ((seeds @ scores.y) * questions).sum(1)


def interval(value: float, draws: Floats, spread: Spread) -> Interval:
    """Return percentiles of the draws, stretched about the value to its spread."""
    error, drawn = spread.standard_error, float(draws.std())
    if np.isnan(error):
        return Interval(value, float("nan"), float("nan"))
    tail = (1 + LEVEL) / 2
    stretch = error / drawn if drawn else 0.0
    stretch *= student_quantile(spread.freedom, tail) / student_quantile(np.inf, tail)
    low, high = np.quantile(value + (draws - draws.mean()) * stretch, [1 - tail, tail])
    return Interval(value, float(low), float(high))


def p_value(difference: float, spread: Spread) -> float:
    """Return the two-sided p-value of a difference by Student's t; NaN if it is unknown."""
    from scipy.special import stdtr

    if np.isnan(spread.standard_error):
        return float("nan")
    if spread.standard_error == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * stdtr(spread.cautious_freedom, -abs(difference) / spread.standard_error))


def student_quantile(freedom: Any, probability: float) -> Any:
    """Return a quantile of Student's t, or of the normal distribution for infinite freedom."""
    from scipy.special import ndtri, stdtrit

    freedom = np.asarray(freedom, float)
    limited = stdtrit(np.minimum(freedom, 1e6), probability)
    return np.where(np.isinf(freedom), ndtri(probability), limited)[()]


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979). NaN stays NaN."""
    known = sorted((p, index) for index, p in enumerate(p_values) if not np.isnan(p))
    adjusted, highest = list(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted


def decide(difference: Interval, adjusted_p: float, *, knows_seeds: bool) -> str:
    """Return BETTER or WORSE if the interval excludes 0 and p is below ERROR, else UNCLEAR."""
    if not knows_seeds or not adjusted_p < ERROR or not difference.excludes(0.0):
        return UNCLEAR
    return BETTER if difference.value > 0 else WORSE


def chance_better(arm: Floats, baseline: Floats) -> float:
    """Return the share of pairs in which the arm [S] beats the baseline [T]; a tie counts half."""
    pairs = arm[:, None] - baseline[None, :]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def visible_difference(spread: Spread, num_comparisons: int = 1) -> float:
    """Return the smallest true difference that is found with chance POWER; NaN if unknown."""
    return spread.standard_error * float(_num_errors(spread.cautious_freedom, num_comparisons))


def _num_errors(freedom: Any, num_comparisons: int) -> Any:
    """Return how many standard errors a difference must have to be found with chance POWER."""
    tail = 1 - ERROR / 2 / max(num_comparisons, 1)
    return student_quantile(freedom, tail) + student_quantile(freedom, POWER)


def seeds_needed(difference: float, spread: Spread, num_comparisons: int = 1) -> int | None:
    """Return the seeds of each arm with which this true difference is found with chance POWER.

    None if no number of seeds suffices; then more questions are needed.
    """
    if len(spread.seeds) < 2 or not difference:
        return None
    counts = range(FEWEST_SEEDS, MOST_SEEDS + 1)
    spreads = [spread.with_seeds(count) for count in counts]
    errors = np.array([one.standard_error for one in spreads])
    needed = _num_errors(np.array([one.cautious_freedom for one in spreads]), num_comparisons)
    enough = np.flatnonzero(errors * needed <= abs(difference))
    return counts[int(enough[0])] if len(enough) else None


def interquartile_mean(values: Floats) -> Any:
    """Return the mean without the lowest and the highest quarter, along the last axis."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def interquartile_interval(scores: Scores, rng: np.random.Generator) -> Interval:
    """Return the interquartile mean over environment x seed; seeds are drawn per environment.

    The interval is a plain percentile interval (Agarwal et al. 2021), without the stretching.
    """
    means = np.stack([one.mean(1) for one, _ in _by_stratum(scores.y, scores.strata)])  # [E, S]
    value = float(interquartile_mean(means.ravel()))
    if not scores.resamples_seeds:
        return Interval(value, float("nan"), float("nan"))
    chosen = rng.integers(scores.num_seeds, size=(NUM_DRAWS, *means.shape))
    drawn = np.take_along_axis(means[None], chosen, 2).reshape(NUM_DRAWS, -1)
    low, high = np.quantile(interquartile_mean(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))
