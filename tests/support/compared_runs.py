"""Runs and arms for a comparison, made of scores without files."""

import numpy as np

from lab.report.arms import Arm
from lab.report.evaluations import Evaluation, Question
from lab.report.run import Curve, Run

NUM_QUESTIONS = 16


def run(scores=None, *, name="run", env="reverse", rewards=(), **keywords) -> Run:
    """Return a run with a score or rewards by question, or with the rewards of its steps."""
    evaluations = {}
    if scores is not None:
        questions = [Question(env, str(index), f"{env} {index}") for index in range(len(scores))]
        asked = [score if isinstance(score, list) else [score] for score in scores]
        evaluations = {20: Evaluation(dict(zip(questions, asked, strict=True)))}
    steps = np.arange(len(rewards), dtype=float)
    training = Curve(steps, 3 * steps, 100 * steps, np.array(rewards, float))
    return Run(name=name, evaluations=evaluations, training=training, **keywords)


def arm(name, y=None, rewards=()) -> Arm:
    """Return an arm with scores y [S, Q], or with the same reward in all steps of a run."""
    runs = [run(scores, name=f"{name}-s{seed}", seed=seed) for seed, scores in enumerate(y or ())]
    runs += [run(rewards=[x] * 20, name=name, seed=seed) for seed, x in enumerate(rewards)]
    return Arm(f"loss={name}", name, tuple(runs))


def scores(seed, gain=0.0, num_seeds=5):
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, 0.02, (num_seeds, 1)) + rng.normal(0, 0.02, (num_seeds, NUM_QUESTIONS))
    return (0.5 + gain + noise).tolist()


def result(comparison, name):
    return next(one for one in comparison.results if one.arm.name == name)
