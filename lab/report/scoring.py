"""Score each run on the same held-out questions, else by the training reward of its last steps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from lab.report.arms import Arm
from lab.report.evaluations import Question
from lab.report.run import LAST_STEPS, Curve, Run
from lab.report.statistics import Scores

HELD_OUT, TRAINING = "held-out questions", "training reward"
FEWEST_SHARED = 0.5  # minimum share of the baseline's questions that a run must have


@dataclass(frozen=True, eq=False)
class ScoredArm:
    """The scored runs of one arm, with their scores."""

    arm: Arm
    runs: tuple[Run, ...]  # one run per row of `scores`
    scores: Scores


@dataclass(frozen=True, eq=False)
class Scoring:
    """The scores of all arms by the same measure."""

    measure: str  # HELD_OUT or TRAINING
    judged: str  # description of the scored versions or steps
    arms: tuple[ScoredArm, ...]
    left_out: tuple[tuple[Run, str], ...]  # finished runs that cannot be scored, and why
    questions: tuple[Question, ...] = ()  # the columns of the scores, empty for TRAINING

    @property
    def runs(self) -> list[Run]:
        """All scored runs of all arms."""
        return [run for arm in self.arms for run in arm.runs]


def score_arms(arms: Sequence[Arm], baseline: Arm, num_judged: int) -> Scoring:
    """Score the finished runs on the baseline's questions, else by their training reward.

    A run is excluded if it was evaluated on, or has scores of, too few of these questions. A
    question is excluded if any of the remaining runs has no score for this question.
    """
    asked = [frozenset(run.questions) for run in baseline.finished if run.evaluations]
    if not asked:
        return _by_training_reward(arms)
    reference = Counter(asked).most_common(1)[0][0]
    tables: dict[int, dict[Question, float]] = {}  # scores of each kept run, by id(run)
    kept: list[tuple[Arm, list[Run]]] = []
    left_out: list[tuple[Run, str]] = []
    for arm in arms:
        runs = []
        for run in arm.finished:
            table = _mean_scores(run, num_judged)
            if not run.evaluations:
                left_out.append((run, "it has no evaluation"))
            elif len(reference & run.questions) < FEWEST_SHARED * len(reference):
                left_out.append((run, f"its questions differ from those of {baseline.name}"))
            elif len(reference & table.keys()) < FEWEST_SHARED * len(reference):
                left_out.append((run, "most of its questions have no score"))
            else:
                runs.append(run)
                tables[id(run)] = table
        if runs:
            kept.append((arm, runs))
    every = [run for _, runs in kept for run in runs]
    questions = tuple(sorted(reference.intersection(*tables.values())))
    if not questions or not any(arm is baseline for arm, _ in kept):
        return _by_training_reward(arms)
    envs = sorted({question.env for question in questions})
    strata = np.array([envs.index(question.env) for question in questions])
    scored = []
    for arm, runs in kept:
        y = np.array([[tables[id(run)][question] for question in questions] for run in runs])
        scored.append(ScoredArm(arm, tuple(runs), Scores(y, strata)))
    judged = _versions_in_words(every, num_judged)
    return Scoring(HELD_OUT, judged, tuple(scored), tuple(left_out), questions)


def _by_training_reward(arms: Sequence[Arm]) -> Scoring:
    scored: list[ScoredArm] = []
    left_out: list[tuple[Run, str]] = []
    for arm in arms:
        left_out += [(r, "it has no reward") for r in arm.finished if r.training_reward is None]
        runs = tuple(run for run in arm.finished if run.training_reward is not None)
        if runs:
            y = np.array([[run.training_reward] for run in runs], float)
            scored.append(ScoredArm(arm, runs, Scores(y, np.zeros(1, np.int64))))
    judged = _last_steps_in_words([run for one in scored for run in one.runs])
    return Scoring(TRAINING, judged, tuple(scored), tuple(left_out))


def _last_steps_in_words(runs: Sequence[Run]) -> str:
    """Return the number of scored steps in words. A run may have fewer steps than LAST_STEPS."""
    counts = _range([len(run.training.scores[-LAST_STEPS:]) for run in runs] or [LAST_STEPS])
    return "the last step" if counts == "1" else f"the last {counts} steps"


def _versions_in_words(runs: Sequence[Run], num_judged: int) -> str:
    """Return the scored policy versions in words."""
    versions = [run.judged_versions(num_judged) for run in runs]
    last, most = _range([one[-1] for one in versions]), max(map(len, versions))
    name = f"version{'s' * (' ' in last)} {last}"
    return name if most == 1 else f"the last {most} evaluations, up to {name}"


def _range(numbers: Sequence[int]) -> str:
    """Return the range of the numbers as text, such as "6" or "6 to 10"."""
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _mean_scores(run: Run, num_judged: int) -> dict[Question, float]:
    """Return the mean over the judged versions for each question that all these versions scored."""
    tables = [run.evaluations[version].scores for version in run.judged_versions(num_judged)]
    questions = set(tables[0]).intersection(*tables) if tables else set()
    means = {q: float(np.mean([table[q] for table in tables])) for q in questions}
    return {question: mean for question, mean in means.items() if not isnan(mean)}


def curve_of(run: Run, measure: str) -> Curve:
    """Return the learning curve of a run for the given measure."""
    return run.held_out if measure == HELD_OUT else run.training.smoothed(LAST_STEPS)
