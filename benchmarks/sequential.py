"""Measure the errors and the seeds of questions that end when they are decided (`until=decided`).

    python -m benchmarks.sequential [--questions 2000] [--arms 2 4 12] [--seed-sd 0.03]

Each line is a kind of question, simulated 2,000 times and looked at after every seed. Arms differ
from the baseline by `difference`, in units of the smallest effect. `wrong` is the share of
questions with a false decision about any arm: better or worse at 0, equal at 1. At most 0.05 plus
two standard errors (`se`) is wanted. `decided` is the share of arms decided within twice `fixed`,
the seeds of a fixed design that knows the variance and detects the difference (at 0: the smallest
effect) with 80 %. `seeds` is their mean number, divided by `fixed`. `group` has the same for Lan
and DeMets' boundaries with O'Brien and Fleming's spending and known variances, and `mixture` for
the t-mixture of Wang and Ramdas. 128 questions are answered four times (binary) or once (heavy:
Student's t with three degrees of freedom, for rewards and seeds); question and arm interact.
"""

import argparse
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import root_scalar
from scipy.special import ndtr, ndtri

from benchmarks._measuring import say
from lab.report.power import POWER
from lab.report.sequential import decision_of, radius
from lab.report.statistics import EQUAL, ERROR, FEWEST_SEEDS, OPEN, student_quantile

EFFECT, NUM_QUESTIONS = 0.03, 128
SEED_SD, INTERACTION_SD, ANSWER_SD, NUM_ANSWERS = 0.03, 0.04, 0.25, 4  # standard deviations
CHUNK = 2_000_000  # scores in memory at once
Floats: TypeAlias = NDArray[np.float64]
Radius: TypeAlias = Callable[[Floats, Floats, int, NDArray[np.int64]], Floats]


def draw(rng: np.random.Generator, rewards: str, shape: tuple[int, ...], gain: float) -> Floats:
    """Return scores [N, A, S, Q] of arms that differ from the first one by `gain`."""
    num, arms, seeds, questions = shape
    mean = rng.uniform(0.25, 0.75, (num, 1, 1, questions))
    mean = mean + rng.normal(0, INTERACTION_SD / 2**0.5, (num, arms, 1, questions))
    mean[:, 1:] += gain
    if rewards == "binary":
        chances = mean + rng.normal(0, SEED_SD, (num, arms, seeds, 1))
        return rng.binomial(NUM_ANSWERS, chances.clip(0, 1)) / NUM_ANSWERS
    tails = (rng.standard_t(3, (num, arms, seeds, n)) / 3**0.5 for n in (1, questions))
    return mean + SEED_SD * next(tails) + ANSWER_SD * next(tails)


def estimates(y: Floats) -> tuple[Floats, Floats, Floats]:
    """Return difference, variance and degrees of freedom [N, A - 1, S] as lab.report.statistics."""
    seeds, questions = y.shape[2:]
    counts = np.arange(1, seeds + 1)
    free = np.maximum(counts - 1, 1)
    means = y.cumsum(2) / counts[:, None]  # of each question
    of_seeds = y.mean(3)
    mean, squares = of_seeds.cumsum(2) / counts, (of_seeds**2).cumsum(2)
    between = (squares - counts * mean**2) / free / counts
    total, of_questions = (y**2).sum(3).cumsum(2), (means**2).sum(3)
    residual = total - counts * of_questions - questions * squares + counts * questions * mean**2
    noise = residual / free / (questions - 1) / (counts * questions)
    own, common = between[:, 1:], between[:, :1]
    questions_part = (means[:, 1:] - means[:, :1]).var(3, ddof=1) / questions
    variance = own + common + questions_part - noise[:, 1:] - noise[:, :1]
    variance = np.maximum(variance, np.maximum(own + common, questions_part))
    terms = (own**2 + common**2) / free + questions_part**2 / (questions - 1)
    return mean[:, 1:] - mean[:, :1], variance, variance**2 / np.maximum(terms, 1e-300)


def decide(
    gains: Floats, variances: Floats, freedom: Floats, radius_at: Radius
) -> tuple[Any, NDArray[np.int64]]:
    """Return each arm's decision and its seeds [N, A - 1], if decided after every seed."""
    num_seeds = gains.shape[2]
    decisions, seeds = np.full(gains.shape[:2], OPEN), np.full(gains.shape[:2], num_seeds + 1)
    for count in range(FEWEST_SEEDS, num_seeds + 1):
        gain, variance, free = (x[..., count - 1] for x in (gains, variances, freedom))
        for _ in range(gains.shape[1]):  # a decision leaves more of ERROR to the other arms
            is_open = decisions == OPEN
            half = radius_at(variance, free, count, np.maximum(is_open.sum(1, keepdims=True), 1))
            found = decision_of(gain - half, gain + half, EFFECT)
            fresh = is_open & (found != OPEN)
            if not fresh.any():
                break
            decisions, seeds = np.where(fresh, found, decisions), np.where(fresh, count, seeds)
    return decisions, seeds


def linear(variance: Floats, free: Floats, count: int, num_open: NDArray[np.int64]) -> Floats:
    """Return the radius of lab/report/sequential.py."""
    return radius(variance, free, count, EFFECT, ERROR / num_open)


def mixture(variance: Floats, free: Floats, _: int, num_open: NDArray[np.int64]) -> Floats:
    """Return the radius of a t-mixture over effects with a standard deviation of EFFECT."""
    share = variance / (variance + EFFECT**2)
    with np.errstate(over="ignore"):
        ratio = (num_open / ERROR / np.sqrt(share)) ** (2 / (free + 1))
    inside = np.where(share * ratio < 1, (ratio - 1) / np.maximum(1 - share * ratio, 1e-12), np.inf)
    return np.sqrt(free * variance * inside)


def group_sequential(variances: Floats, arms: int) -> Radius:
    """Return the radius of group-sequential tests, whose last look is that of `variances` [S]."""
    tables = np.array([spent_levels(variances[-1] / variances, ERROR / n) for n in range(1, arms)])

    def radius_at(variance: Floats, free: Floats, count: int, num_open: Any) -> Floats:
        if count > len(variances):
            return np.full_like(variance, np.inf)
        levels = tables[num_open - 1, count - 1]
        half = -student_quantile(free, np.maximum(levels, 1e-12)) * np.sqrt(variance)
        return np.where(levels > 0, half, np.inf)

    return radius_at


def spent_levels(times: Floats, error: float) -> Floats:
    """Return the one-sided level of each look at a share of the information, by Lan and DeMets."""
    spent = 2 * ndtr(ndtri(error / 2) / np.sqrt(times))
    levels, grid, density, before, done = [], np.zeros(1), np.ones(1), 0.0, 0.0
    for time, until in zip(times, spent, strict=True):
        if until - done < 1e-9:
            levels.append(0.0)
            continue
        step = np.sqrt(time - before)

        def excess(bound: float, grid: Floats, mass: Floats, step: float, due: float) -> float:
            return float((2 * mass * ndtr((grid - bound) / step)).sum()) - due

        given, bracket = (grid, density, step, until - done), (0, 20 * np.sqrt(time))
        bound = float(root_scalar(excess, given, bracket=bracket).root)
        levels.append(float(ndtr(-bound / np.sqrt(time))))
        fresh = np.linspace(-bound, bound, 801)
        kernel = np.exp(-(((fresh[:, None] - grid) / step) ** 2) / 2) / step / np.sqrt(2 * np.pi)
        density = (kernel @ density) * (fresh[1] - fresh[0])
        grid, before, done = fresh, time, until
    return np.array(levels)


def variance_after(seeds: Any, rewards: str) -> Any:
    """Return the true variance of a difference after some seeds."""
    answers = 0.25 - 0.5**2 / 12 - INTERACTION_SD**2 / 2 - SEED_SD**2  # mean of p (1 - p)
    noise = answers / NUM_ANSWERS if rewards == "binary" else ANSWER_SD**2
    return 2 * (SEED_SD**2 + noise / NUM_QUESTIONS) / seeds + INTERACTION_SD**2 / NUM_QUESTIONS


def fixed_seeds(gain: float, num_arms: int, rewards: str) -> int:
    """Return the seeds with which a fixed design with known variances detects a difference."""
    wanted = (gain / (ndtri(1 - ERROR / 2 / (num_arms - 1)) + ndtri(POWER))) ** 2
    counts = np.arange(2, 1000)
    return int(counts[np.argmax(variance_after(counts, rewards) <= wanted)])


def measured(cell: tuple[int, str, float], num_questions: int) -> dict[str, Any]:
    """Simulate the questions of one cell."""
    num_arms, rewards, difference = cell
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    plan = fixed_seeds(EFFECT, num_arms, rewards)
    fixed, most = fixed_seeds(EFFECT * max(difference, 1), num_arms, rewards), 2 * plan
    known = variance_after(np.arange(1, plan + 1), rewards)
    rules = {"": linear, "group_": group_sequential(known, num_arms), "mixture_": mixture}
    found: dict[str, list[Any]] = {name: [] for name in rules}
    size = max(CHUNK // (num_arms * most * NUM_QUESTIONS), 1)
    for start in range(0, num_questions, size):
        shape = (min(size, num_questions - start), num_arms, most, NUM_QUESTIONS)
        numbers = estimates(draw(rng, rewards, shape, difference * EFFECT))
        for name, rule in rules.items():
            found[name].append(decide(*numbers, rule))
    line = {"arms": num_arms, "rewards": rewards, "difference": difference, "fixed": fixed}
    for name, parts in found.items():
        decisions, seeds = (np.concatenate(one) for one in zip(*parts, strict=True))
        is_equal, is_decided = decisions == EQUAL, decisions != OPEN
        false = is_equal if difference else is_decided & ~is_equal
        wrong, limit = float(false.any(1).mean()), plan if name == "group_" else most
        line[f"{name}wrong"] = wrong
        if not name:
            line["se"] = (wrong * (1 - wrong) / num_questions) ** 0.5
        line[f"{name}decided"] = float((seeds <= 2 * fixed).mean())
        line[f"{name}seeds"] = float(np.minimum(seeds, limit).mean()) / fixed
    return line


def main() -> None:
    """Print one JSON line for each kind of question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--arms", type=int, nargs="+", default=[2, 4, 12])
    parser.add_argument("--seed-sd", type=float, default=SEED_SD)
    given = parser.parse_args()
    cells = list(product(given.arms, ("binary", "heavy"), (0, 1, 1.5)))
    spread = {"SEED_SD": given.seed_sd}
    with ProcessPoolExecutor(2, None, globals().update, (spread,)) as pool:
        for line in pool.map(measured, cells, [given.questions] * len(cells)):
            say(**line)


if __name__ == "__main__":
    main()
