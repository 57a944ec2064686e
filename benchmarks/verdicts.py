"""Measure how often a report calls an arm better or worse although all arms are equal.

    python -m benchmarks.verdicts [--sweeps 1000] [--only "worst runs ended early"]

Each line is one kind of sweep, simulated 1,000 times with fixed seeds: two equal arms answer 16
questions six times, and their seeds differ by 0.05. `called` is the share of sweeps in which the
code of report.py names the other arm better or worse; at most 0.05 is wanted. `without_care`, which
the program of 07b74374 measured, is the share in which the interval and the p-value alone do.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks._measuring import say
from lab.report.arms import Arm
from lab.report.comparison import compare
from lab.report.evaluations import Evaluation, Question
from lab.report.run import Run
from lab.report.statistics import OPEN

NUM_QUESTIONS, NUM_ROLLOUTS, SEED_SPREAD = 16, 6, 0.05
NUM_DRAWS = 500  # a report has more, for more exact intervals
LAST, EARLIER = 80, 60  # policy versions
PROGRESS = 0.9  # a run's share of its final score at version EARLIER
QUESTIONS = [Question("simulated", str(index), str(index)) for index in range(NUM_QUESTIONS)]
Rewards: TypeAlias = NDArray[np.float64]  # rewards by question and rollout
Sweep: TypeAlias = Iterator[list[Arm]]  # the arms at each look, the baseline first


class World:
    """Equal arms: the probability that an answer is right depends on question and seed alone."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.difficulty = rng, rng.uniform(0.2, 0.8, NUM_QUESTIONS)

    def chances(self, num_seeds: int) -> Rewards:
        """Return the probability of a right answer by seed and question."""
        seeds = self.rng.normal(0, SEED_SPREAD, (num_seeds, 1))
        return np.clip(self.difficulty + seeds, 0.01, 0.99)

    def rewards(self, chances: Rewards) -> Rewards:
        """Return 0 or 1 for each rollout, given the probabilities by seed and question."""
        shape = (*chances.shape, NUM_ROLLOUTS)
        return (self.rng.random(shape) < chances[..., None]).astype(float)

    def arm(self, name: str, num_seeds: int) -> Arm:
        """Return an arm whose runs all finished."""
        return arm_of(name, self.rewards(self.chances(num_seeds)))


def run_of(rewards: Rewards, seed: int, version: int = LAST, cause: str = "") -> Run:
    """Return a run with these rewards, NaN for an unscored rollout."""
    known = [[None if math.isnan(x) else x for x in of_question] for of_question in rewards]
    evaluations = {version: Evaluation(dict(zip(QUESTIONS, known, strict=True)))}
    return Run(name=f"s{seed}", seed=seed, cause=cause, num_steps=LAST, evaluations=evaluations)


def arm_of(name: str, *repeats: Rewards) -> Arm:
    """Return an arm with a finished run for each seed of each repeat."""
    runs = tuple(run_of(one, seed) for rewards in repeats for seed, one in enumerate(rewards))
    return Arm(name, name, runs)


def whole(world: World) -> Sweep:
    """Nothing is missing: five seeds."""
    yield [world.arm("base", 5), world.arm("other", 5)]


def unscored(world: World, reward: float) -> Sweep:
    """One arm loses the score of half of its rollouts with this reward."""
    rewards = world.rewards(world.chances(5))
    lost = (rewards == reward) & (world.rng.random(rewards.shape) < 0.5)
    yield [world.arm("base", 5), arm_of("other", np.where(lost, np.nan, rewards))]


def ended_early(world: World, order: Callable[[Rewards, World], NDArray[Any]]) -> Sweep:
    """Three of ten runs of one arm stop at an earlier evaluation: the first ones in this order."""
    chances = world.chances(10)
    final, earlier = world.rewards(chances), world.rewards(PROGRESS * chances)
    runs = list(arm_of("other", final).runs)
    for seed in order(final.mean((1, 2)), world)[:3].tolist():
        runs[seed] = run_of(earlier[seed], seed, EARLIER, "it failed")
    yield [world.arm("base", 10), Arm("other", "other", tuple(runs))]


def repeated(world: World) -> Sweep:
    """Every seed of both arms ran three times."""
    arms = []
    for name in ("base", "other"):
        chances = world.chances(4)
        arms.append(arm_of(name, *(world.rewards(chances) for _ in range(3))))
    yield arms


def grown(world: World) -> Sweep:
    """Three seeds, then one more after each look, up to fifteen, until a difference is found."""
    arms = [world.arm(name, 15) for name in ("base", "other")]
    for size in range(3, 16):
        yield [
            replace(arm, runs=tuple(replace(r, grown=max(r.seed - 2, 0)) for r in arm.runs[:size]))
            for arm in arms
        ]


CASES: dict[str, Callable[[World], Sweep]] = {
    "whole": whole,
    "wrong answers unscored": partial(unscored, reward=0.0),
    "right answers unscored": partial(unscored, reward=1.0),
    "worst runs ended early": partial(ended_early, order=lambda scores, _: np.argsort(scores)),
    "best runs ended early": partial(ended_early, order=lambda scores, _: np.argsort(-scores)),
    "any runs ended early": partial(
        ended_early, order=lambda scores, world: world.rng.permutation(len(scores))
    ),
    "seeds repeated": repeated,
    "grown": grown,
}


def judged(case: str, number: int) -> bool:
    """Simulate one sweep: is the other arm called better or worse at any look?"""
    world = World(np.random.default_rng([list(CASES).index(case), number]))
    looks = (compare(arms, num_draws=NUM_DRAWS) for arms in CASES[case](world))
    return any(look.others[0].decision != OPEN for look in looks)


def main() -> None:
    """Print one JSON line for each kind of sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweeps", type=int, default=1000)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--processes", type=int)
    given = parser.parse_args()
    with ProcessPoolExecutor(given.processes) as pool:
        for case in [given.only] if given.only else CASES:
            found = pool.map(judged, repeat(case), range(given.sweeps), chunksize=25)
            called = sum(found) / given.sweeps
            error = math.sqrt(called * (1 - called) / given.sweeps)
            say(case=case, sweeps=given.sweeps, called=called, standard_error=error)


if __name__ == "__main__":
    main()
