"""What runs are judged by: the same held-out questions, else the reward of the last steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np

from rl.report.arms import Arm
from rl.report.curve import Curve
from rl.report.evaluations import Question
from rl.report.evidence import LAST_STEPS, Evidence
from rl.report.statistics import Scores

HELD_OUT, TRAINING = "held-out questions", "training reward"
FEWEST_SHARED = 0.5  # of the baseline's questions, for a run to be compared with it


@dataclass(frozen=True, eq=False)
class JudgedArm:
    """The runs of an arm that can be judged as all others are."""

    arm: Arm
    runs: tuple[Evidence, ...]  # one a line of `scores`
    scores: Scores


@dataclass(frozen=True, eq=False)
class Judgement:
    """The scores of all runs, by one measure."""

    measure: str  # HELD_OUT or TRAINING
    judged: str  # which versions or steps, in words
    arms: tuple[JudgedArm, ...]
    questions: tuple[Question, ...]  # columns of the scores; none for TRAINING
    left_out: tuple[tuple[Evidence, str], ...]  # finished runs that cannot be judged, and why

    @property
    def runs(self) -> list[Evidence]:
        """Every run that is judged."""
        return [run for arm in self.arms for run in arm.runs]


def judge(arms: Sequence[Arm], control: Arm, num_judged: int) -> Judgement:
    """Judge the finished runs by the questions that the control's were asked, if they were.

    A run that was asked others is left out, and one that could be scored on few of them; so is a
    question that some other run could not be scored on.
    """
    asked = [tuple(sorted(questions_of(run))) for run in control.finished if run.evaluations]
    if not asked:
        return _by_training_reward(arms)
    reference = set(Counter(asked).most_common(1)[0][0])
    tables = {
        id(run): _judged_scores(run, num_judged)
        for arm in arms
        for run in arm.finished
        if run.evaluations
    }
    kept: list[tuple[Arm, list[Evidence]]] = []
    left_out: list[tuple[Evidence, str]] = []
    for arm in arms:
        runs = []
        for run in arm.finished:
            if not run.evaluations:
                left_out.append((run, "it has no evaluation"))
            elif len(reference & questions_of(run)) < FEWEST_SHARED * len(reference):
                left_out.append((run, f"it was asked other questions than {control.name}"))
            elif len(reference & _scored(tables[id(run)])) < FEWEST_SHARED * len(reference):
                left_out.append((run, "it could not be scored on most of its questions"))
            else:
                runs.append(run)
        if runs:
            kept.append((arm, runs))
    if not any(arm is control for arm, _ in kept):
        return _by_training_reward(arms)
    scored = [_scored(tables[id(run)]) for _, runs in kept for run in runs]
    questions = tuple(sorted(reference.intersection(*scored)))
    if not questions:
        return _by_training_reward(arms)
    envs = sorted({question.env for question in questions})
    strata = np.array([envs.index(question.env) for question in questions])
    judged = [
        JudgedArm(
            arm,
            tuple(runs),
            Scores(np.array([[tables[id(run)][q] for q in questions] for run in runs]), strata),
        )
        for arm, runs in kept
    ]
    every = [run for _, runs in kept for run in runs]
    return Judgement(
        HELD_OUT, _versions(every, num_judged), tuple(judged), questions, tuple(left_out)
    )


def _by_training_reward(arms: Sequence[Arm]) -> Judgement:
    judged: list[JudgedArm] = []
    left_out: list[tuple[Evidence, str]] = []
    for arm in arms:
        left_out += [(r, "it has no reward") for r in arm.finished if r.training_reward is None]
        runs = tuple(run for run in arm.finished if run.training_reward is not None)
        if runs:
            y = np.array([[run.training_reward] for run in runs], float)
            judged.append(JudgedArm(arm, runs, Scores(y, np.zeros(1, np.int64))))
    every = [run for one in judged for run in one.runs]
    return Judgement(TRAINING, _last_steps(every), tuple(judged), (), tuple(left_out))


def _last_steps(runs: Sequence[Evidence]) -> str:
    """How many steps the scores are of, in words: a run may be shorter than LAST_STEPS."""
    counts = {len(run.training.scores[-LAST_STEPS:]) for run in runs} or {LAST_STEPS}
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "the last step"
    return f"the last {most if fewest == most else f'{fewest} to {most}'} steps"


def questions_of(run: Evidence) -> set[Question]:
    """What the last evaluation of a run asked."""
    return set(list(run.evaluations.values())[-1].scores) if run.evaluations else set()


def judged_versions(run: Evidence, num_judged: int) -> list[int]:
    """The last versions that were evaluated; what was never trained only if there is no other."""
    trained = [version for version in run.evaluations if version > 0]
    return trained[-num_judged:] or list(run.evaluations)


def _judged_scores(run: Evidence, num_judged: int) -> dict[Question, float]:
    """Mean over the judged versions, NaN for what one of them lacks."""
    tables = [run.evaluations[version].scores for version in judged_versions(run, num_judged)]
    return {
        question: float(np.mean([table.get(question, nan) for table in tables]))
        for question in tables[-1]
    }


def _scored(table: dict[Question, float]) -> set[Question]:
    return {question for question, score in table.items() if not isnan(score)}


def _versions(runs: Sequence[Evidence], num_judged: int) -> str:
    """Which versions the scores are of, in words."""
    versions = [judged_versions(run, num_judged) for run in runs]
    first, last = min(v[-1] for v in versions), max(v[-1] for v in versions)
    name = f"version {last}" if first == last else f"versions {first} to {last}"
    most = max(map(len, versions))
    return name if most == 1 else f"the last {most} evaluations, up to {name}"


def curve_of(run: Evidence, measure: str) -> Curve:
    """The run's scores over its course."""
    return run.held_out if measure == HELD_OUT else run.training.smoothed(LAST_STEPS)
