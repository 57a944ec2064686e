"""What the scores of several seeds on the same questions say about arms: intervals and verdicts.

    y[s, q]   mean reward of seed s of one arm on held-out question q        [S, Q]
    score     mean of y;  difference = score(arm) - score(baseline), paired in q

Intervals are percentiles of a two-way bootstrap: seeds are drawn within each arm, questions once
for all arms and within their environment. As drawn, such a mean is off in two ways: the noise of
single rollouts enters up to three times (Owen 2007, "The pigeonhole bootstrap"), and n seeds drawn
from n vary less than seeds do. So the draws are stretched about the estimate to the spread of

    V = sum_a A_a + C - sum_a R_a     A  between the seeds of an arm: var_s(mean_q y) / S
                                      C  between questions: var_q(mean_s y, or its difference) / Q
                                      R  noise that is in both: var(residual) / (S Q)

(two-way clustering: Cameron, Gelbach, Miller 2011), times t / z for its degrees of freedom
(Satterthwaite 1946). With fewer than FEWEST_SEEDS seeds in an arm its seeds are taken as given, and
no verdict about the arm is drawn: a verdict needs an interval that knows how much seeds differ.
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
ERROR = 0.05  # share of sweeps of equal arms in which a verdict may name one
POWER = 0.8
FEWEST_SEEDS = 3  # to be resampled
MOST_SEEDS = 1000  # that anybody is told to run
BETTER, WORSE, UNCLEAR = "better", "worse", "cannot tell"


@dataclass(frozen=True)
class Interval:
    """An estimate and where it may lie; NaN ends where nothing is known of its spread."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside; False where nothing is known."""
        return bool(self.low > value or self.high < value)


@dataclass(frozen=True, eq=False)
class Scores:
    """One arm: y [S, Q], and the environment of each question [Q] by number."""

    y: Floats
    strata: NDArray[np.int64]

    @property
    def num_seeds(self) -> int:
        """S."""
        return len(self.y)

    @property
    def resamples_seeds(self) -> bool:
        """Whether there are enough seeds to say how much they differ."""
        return self.num_seeds >= FEWEST_SEEDS

    @property
    def runs(self) -> Floats:
        """Score of each seed [S]."""
        return self.y.mean(1)

    @property
    def between_seeds(self) -> float:
        """A: variance of the arm's score from its seeds; 0 where they are taken as given."""
        return float(self.runs.var(ddof=1) / self.num_seeds) if self.resamples_seeds else 0.0

    @cached_property
    def noise(self) -> float:
        """R: what of A is the noise of single rollouts, which C has in it, too."""
        if not self.resamples_seeds:
            return 0.0
        total = 0.0
        for part, share in _by_stratum(self.y, self.strata):
            seeds, questions = part.shape
            if questions > 1:
                residual = part - part.mean(0) - part.mean(1, keepdims=True) + part.mean()
                square = (residual**2).sum() / ((seeds - 1) * (questions - 1))
                total += share**2 * square / (seeds * questions)
        return float(total)


def _by_stratum(y: Floats, strata: NDArray[np.int64]) -> list[tuple[Floats, float]]:
    """The columns of each environment, and its share of all."""
    parts = [y[..., strata == stratum] for stratum in np.unique(strata)]
    return [(part, part.shape[-1] / len(strata)) for part in parts]


@dataclass(frozen=True)
class Spread:
    """Variance of a score or of a difference of two, by where it comes from."""

    seeds: tuple[tuple[float, int], ...]  # (A, S) of each arm whose seeds are resampled
    questions: float  # C
    noise: float  # R
    free_questions: int  # all but one of each environment: C's degrees of freedom

    @property
    def variance(self) -> float:
        """V; NaN where neither seeds nor questions can say anything."""
        seeds = sum(variance for variance, _ in self.seeds)
        if not self.seeds and not self.free_questions:
            return float("nan")
        # A and C each estimate a part of the whole, so by chance alone is V below one of them.
        return max(seeds + self.questions - self.noise, seeds, self.questions)

    @property
    def standard_error(self) -> float:
        """Square root of V."""
        return float(np.sqrt(self.variance))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of V: few seeds make it uncertain as far as V comes from them."""
        total = sum(variance for variance, _ in self.seeds)
        return self._freedom((self.variance - self.questions) / total if total else 0.0)

    @property
    def cautious_freedom(self) -> float:
        """The same for verdicts, as if V came from all that the seeds differ by.

        Among many arms some look alike in their few seeds by chance alone: with `freedom` one of
        eight sweeps of twelve equal arms would name a winner, with this one of thirty.
        """
        return self._freedom(1.0)

    def _freedom(self, share: float) -> float:
        parts = sum(share * variance**2 / (seeds - 1) for variance, seeds in self.seeds)
        parts += self.questions**2 / max(self.free_questions, 1)
        return float(self.variance**2 / parts) if parts else float("inf")

    def with_seeds(self, num_seeds: int) -> "Spread":
        """What it would be with so many seeds in each arm."""
        seeds = tuple((variance * old / num_seeds, num_seeds) for variance, old in self.seeds)
        lasting = max(self.questions - self.noise, 0.0)  # more seeds do not help against it
        return Spread(seeds, lasting, 0.0, self.free_questions)


def spread_of(arm: Scores, baseline: Scores | None = None) -> Spread:
    """The spread of an arm's score, or of its difference to the baseline's."""
    arms = [arm] if baseline is None else [arm, baseline]
    means = arm.y.mean(0) if baseline is None else arm.y.mean(0) - baseline.y.mean(0)
    questions = sum(
        share**2 * part.var(ddof=1) / len(part)
        for part, share in _by_stratum(means, arm.strata)
        if len(part) > 1
    )
    seeds = tuple((one.between_seeds, one.num_seeds) for one in arms if one.resamples_seeds)
    free = len(means) - len(np.unique(arm.strata))
    return Spread(seeds, float(questions), sum(one.noise for one in arms), free)


def question_weights(
    strata: NDArray[np.int64], rng: np.random.Generator, num_draws: int = NUM_DRAWS
) -> Floats:
    """How much each question weighs in each draw [D, Q]; a line adds up to 1."""
    weights = np.empty((num_draws, len(strata)))
    for stratum in np.unique(strata):
        chosen = np.flatnonzero(strata == stratum)
        weights[:, chosen] = _multinomial(len(chosen), rng, num_draws)
    return weights / len(strata)


def seed_weights(num_seeds: int, rng: np.random.Generator, num_draws: int = NUM_DRAWS) -> Floats:
    """How much each seed weighs in each draw [D, S]; a line adds up to 1."""
    if num_seeds < FEWEST_SEEDS:
        return np.full((num_draws, num_seeds), 1 / num_seeds)
    return _multinomial(num_seeds, rng, num_draws) / num_seeds


def _multinomial(size: int, rng: np.random.Generator, num_draws: int) -> Floats:
    return rng.multinomial(size, np.full(size, 1 / size), num_draws).astype(float)


def draw_scores(scores: Scores, seeds: Floats, questions: Floats) -> Floats:
    """The arm's score in each draw [D]: the plain two-way bootstrap."""
    return ((seeds @ scores.y) * questions).sum(1)


def interval(value: float, draws: Floats, spread: Spread) -> Interval:
    """Percentiles of the draws, stretched about the value to the spread that is known of it."""
    error, drawn = spread.standard_error, float(draws.std())
    if np.isnan(error):
        return Interval(value, float("nan"), float("nan"))
    tail = (1 + LEVEL) / 2
    stretch = error / drawn if drawn else 0.0
    stretch *= student_quantile(spread.freedom, tail) / student_quantile(np.inf, tail)
    low, high = np.quantile(value + (draws - draws.mean()) * stretch, [1 - tail, tail])
    return Interval(value, float(low), float(high))


def p_value(difference: float, spread: Spread) -> float:
    """Chance of a difference at least as large between equal arms, by Student's t; NaN: unknown."""
    from scipy.special import stdtr

    if np.isnan(spread.standard_error):
        return float("nan")
    if spread.standard_error == 0:
        return 1.0 if difference == 0 else 0.0
    return float(2 * stdtr(spread.cautious_freedom, -abs(difference) / spread.standard_error))


def student_quantile(freedom: Any, probability: float) -> Any:
    """Quantile of Student's t; the normal distribution's for infinite freedom."""
    from scipy.special import ndtri, stdtrit

    freedom = np.asarray(freedom, float)
    limited = stdtrit(np.minimum(freedom, 1e6), probability)
    return np.where(np.isinf(freedom), ndtri(probability), limited)[()]


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979); one that is not known stays so."""
    known = sorted((p, index) for index, p in enumerate(p_values) if not np.isnan(p))
    adjusted, highest = list(p_values), 0.0
    for rank, (p, index) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        adjusted[index] = highest
    return adjusted


def verdict(difference: Interval, adjusted_p: float, *, knows_seeds: bool) -> str:
    """In words, whether the arm is better than the baseline: only if interval and p both say so."""
    if not knows_seeds or not adjusted_p < ERROR or not difference.excludes(0.0):
        return UNCLEAR
    return BETTER if difference.value > 0 else WORSE


def chance_better(arm: Floats, baseline: Floats) -> float:
    """P(better): how often a run of the arm [S] beats one of the baseline [T]; a tie is half."""
    pairs = arm[:, None] - baseline[None, :]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2)


def visible_difference(spread: Spread, num_comparisons: int = 1) -> float:
    """The smallest true difference that a verdict would have named with POWER; NaN: none."""
    return spread.standard_error * float(_reach(spread.cautious_freedom, num_comparisons))


def _reach(freedom: Any, num_comparisons: int) -> Any:
    """Standard errors that a difference must have for a verdict with POWER."""
    tail = 1 - ERROR / 2 / max(num_comparisons, 1)
    return student_quantile(freedom, tail) + student_quantile(freedom, POWER)


def seeds_needed(difference: float, spread: Spread, num_comparisons: int = 1) -> int | None:
    """Seeds of each arm with which this difference would be named with POWER.

    None where no number of them would do: then it takes more questions.
    """
    if len(spread.seeds) < 2 or not difference:
        return None
    counts = range(FEWEST_SEEDS, MOST_SEEDS + 1)
    spreads = [spread.with_seeds(count) for count in counts]
    errors = np.array([one.standard_error for one in spreads])
    reach = _reach(np.array([one.cautious_freedom for one in spreads]), num_comparisons)
    enough = np.flatnonzero(errors * reach <= abs(difference))
    return counts[int(enough[0])] if len(enough) else None


def interquartile_mean(values: Floats) -> Any:
    """The mean without the lowest and the highest quarter, along the last axis."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def interquartile_interval(scores: Scores, rng: np.random.Generator) -> Interval:
    """Interquartile mean over environment x seed; seeds are drawn within each environment.

    A percentile interval as drawn (Agarwal et al. 2021): nothing is known of its true spread.
    """
    means = np.stack([part.mean(1) for part, _ in _by_stratum(scores.y, scores.strata)])  # [E, S]
    value = float(interquartile_mean(means.ravel()))
    if not scores.resamples_seeds:
        return Interval(value, float("nan"), float("nan"))
    chosen = rng.integers(scores.num_seeds, size=(NUM_DRAWS, *means.shape))
    drawn = np.take_along_axis(means[None], chosen, 2).reshape(NUM_DRAWS, -1)
    low, high = np.quantile(interquartile_mean(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))
