"""Measure the errors and the seeds of questions that end when they are decided (`until=decided`).

    python -m benchmarks.sequential [--questions 2000] [--arms 2 12] [--seed-sd 0.03]   10 min

Each line is a kind of question, simulated 2,000 times and looked at after every seed. Arms differ
from the baseline by `difference`, in units of the smallest effect. `wrong` is the share of
questions with a false decision about any arm: better or worse at 0, equal at 1. At most 0.05 plus
two standard errors (`se`) is wanted. `decided` is the share of arms decided within twice `fixed`,
the seeds of a fixed design that knows the variance and detects the smallest effect with 80 %.
`seeds` is their mean number, divided by `fixed`. 128 questions are answered four times with a
reward of 0 or 1; question and arm interact. The program of 07b74374 also measured rewards with
heavy tails, `group`, Lan and DeMets' boundaries with O'Brien and Fleming's spending and known
variances, and `mixture`, the t-mixture of Wang and Ramdas.
"""

import argparse
import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from benchmarks._measuring import say
from lab.report.power import POWER, fewest_seeds
from lab.report.sequential import decide_arms
from lab.report.statistics import BETTER, EQUAL, ERROR, OPEN, WORSE, Scores

EFFECT, NUM_QUESTIONS = 0.03, 128
INTERACTION_SD, NUM_ANSWERS = 0.04, 4
Floats: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = tuple[int, float]  # number of arms, difference


def draw(rng: np.random.Generator, kind: Kind, seed_sd: float, num_seeds: int) -> Floats:
    """Return scores [A, S, Q] of arms that differ from the first one by the difference."""
    num_arms, difference = kind
    mean = rng.uniform(0.25, 0.75, (1, 1, NUM_QUESTIONS))
    mean = mean + rng.normal(0, INTERACTION_SD / 2**0.5, (num_arms, 1, NUM_QUESTIONS))
    mean[1:] += difference * EFFECT
    chances = mean + rng.normal(0, seed_sd, (num_arms, num_seeds, 1))
    return rng.binomial(NUM_ANSWERS, chances.clip(0, 1)) / NUM_ANSWERS


def decided(number: int, kind: Kind, seed_sd: float, num_seeds: int) -> list[tuple[str, int]]:
    """Simulate a question; return the decision about each arm, and after how many seeds."""
    rng = np.random.default_rng([zlib.crc32(repr(kind).encode()), number])
    strata = np.zeros(NUM_QUESTIONS, np.int64)
    scores = [Scores(y, strata) for y in draw(rng, kind, seed_sd, num_seeds)]
    found = []
    for state in decide_arms(scores, 0, EFFECT)[1:]:
        assert state.spread
        looks = max(num for _, num in state.spread.seeds)
        found.append((state.decision, looks if state.decision != OPEN else num_seeds + 1))
    return found


def fixed_seeds(num_arms: int, seed_sd: float) -> int:
    """Return the seeds with which a fixed design with known variances detects EFFECT."""
    answers = 0.25 - 0.5**2 / 12 - INTERACTION_SD**2 / 2 - seed_sd**2  # mean of p (1 - p)
    of_seeds = 2 * (seed_sd**2 + answers / NUM_ANSWERS / NUM_QUESTIONS)
    wanted = (EFFECT / (ndtri(1 - ERROR / 2 / (num_arms - 1)) + ndtri(POWER))) ** 2
    of_questions = INTERACTION_SD**2 / NUM_QUESTIONS
    return int(fewest_seeds(lambda count: of_seeds / count + of_questions <= wanted))


def main() -> None:
    """Print one JSON line for each kind of question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--arms", type=int, nargs="+", default=[2, 12])
    parser.add_argument("--seed-sd", type=float, default=0.03)
    given = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        for kind in product(given.arms, (0, 1)):
            arms, difference = kind
            fixed = fixed_seeds(arms, given.seed_sd)
            work = partial(decided, kind=kind, seed_sd=given.seed_sd, num_seeds=2 * fixed)
            questions = list(pool.map(work, range(given.questions), chunksize=25))
            false = (EQUAL,) if difference else (BETTER, WORSE)
            wrong = np.mean([any(one in false for one, _ in question) for question in questions])
            seeds = np.array([[number for _, number in question] for question in questions])
            say(
                arms=arms,
                difference=difference,
                fixed=fixed,
                wrong=float(wrong),
                se=float(wrong * (1 - wrong) / given.questions) ** 0.5,
                decided=float((seeds <= 2 * fixed).mean()),
                seeds=float(seeds.clip(max=2 * fixed).mean() / fixed),
            )


if __name__ == "__main__":
    main()
