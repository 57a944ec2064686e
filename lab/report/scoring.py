"""Score all runs on the same held-out questions, or all runs by their last training rewards."""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np

from lab.report.arms import Arm
from lab.report.evaluations import Question
from lab.report.run import LAST_STEPS, Run
from lab.report.statistics import Floats, Scores

HELD_OUT, TRAINING = "held-out questions", "training reward"
MIN_SHARE = 0.5  # a run must have scores for this share of the baseline's questions
_MOSTLY_UNSCORED = "most of its questions have no score"
NO_QUESTION = Question("", "", "")  # the key of a Table if the training reward is the score

Table = Mapping[Question, float]  # question -> score of one run
Rows = Sequence[tuple[Run, Table]]


@dataclass(frozen=True, eq=False)
class ScoredArm:
    arm: Arm
    rows: Rows  # the scored runs, each with its scores by question
    # The runs that ended early or are mostly unscored, unless a scored run has the same seed.
    lost: tuple[Run, ...]
    run_scores: Floats  # the mean score of each scored run
    scores: Scores  # one row per seed, the mean over the runs with this seed
    num_rollouts: int  # number of rollouts in the evaluations that the scores are computed from
    num_unscored: int  # number of these rollouts that have no score

    @property
    def runs(self) -> list[Run]:
        return [run for run, _ in self.rows]


@dataclass(frozen=True, eq=False)
class Scoring:
    measure: str  # HELD_OUT or TRAINING
    judged: str  # the scored policy versions or steps in words, such as "the last 10 steps"
    arms: tuple[ScoredArm, ...]
    left_out: tuple[tuple[Run, str], ...]  # finished runs that cannot be scored, and why
    num_judged: int  # number of last evaluations whose mean is the score of a run
    questions: tuple[Question, ...] = ()  # the columns of ScoredArm.scores, empty for TRAINING
    why_training: str = ""  # why the measure is TRAINING although the baseline was evaluated

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]


def score_arms(arms: Sequence[Arm], baseline: Arm, num_judged: int) -> Scoring:
    """Score the finished runs on the baseline's questions, or else by their training rewards.

    First exclude runs with too few of these questions or scores. Then exclude questions for which
    a remaining run has no score. Use training rewards if no question or baseline run remains.
    """
    asked = [frozenset(run.questions) for run in baseline.finished if run.evaluations]
    if not asked:
        return _score_by_training_reward(arms)
    reference = Counter(asked).most_common(1)[0][0]
    kept: list[tuple[Arm, Rows]] = []
    left_out: list[tuple[Run, str]] = []
    for arm in arms:
        rows: list[tuple[Run, Table]] = []
        for run in arm.finished:
            table = mean_scores(run, num_judged)
            if not run.evaluations:
                left_out.append((run, "it has no evaluation"))
            elif len(reference & run.questions) < MIN_SHARE * len(reference):
                left_out.append((run, f"its questions differ from those of {baseline.name}"))
            elif len(reference & table.keys()) < MIN_SHARE * len(reference):
                left_out.append((run, _MOSTLY_UNSCORED))
            else:
                rows.append((run, table))
        if rows:
            kept.append((arm, rows))
    runs = [run for _, rows in kept for run, _ in rows]
    tables = [table for _, rows in kept for _, table in rows]
    questions = tuple(sorted(reference.intersection(*tables)))
    if not any(arm is baseline for arm, _ in kept):
        why = f"most evaluation questions of {baseline.name} have no score"
        return _score_by_training_reward(arms, why)
    if not questions:
        return _score_by_training_reward(arms, "no evaluation question has a score in every run")
    lost = {run for run, why in left_out if why == _MOSTLY_UNSCORED}
    scored = tuple(_scored_arm(*one, questions, lost, num_judged) for one in kept)
    judged = _versions_in_words(runs, num_judged)
    return Scoring(HELD_OUT, judged, scored, tuple(left_out), num_judged, questions)


def _score_by_training_reward(arms: Sequence[Arm], why_training: str = "") -> Scoring:
    scored: list[ScoredArm] = []
    left_out: list[tuple[Run, str]] = []
    for arm in arms:
        rewards = [(run, run.training_reward) for run in arm.finished]
        left_out += [(run, "it has no reward") for run, reward in rewards if reward is None]
        if rows := [(run, {NO_QUESTION: reward}) for run, reward in rewards if reward is not None]:
            scored.append(_scored_arm(arm, rows, [NO_QUESTION], set(), 0))
    runs = [run for one in scored for run in one.runs]
    counts = as_range([len(run.training.scores[-LAST_STEPS:]) for run in runs] or [LAST_STEPS])
    judged = "the last step" if counts == "1" else f"the last {counts} steps"
    return Scoring(TRAINING, judged, tuple(scored), tuple(left_out), 1, why_training=why_training)


def _scored_arm(
    arm: Arm,
    rows: Rows,
    questions: Sequence[Question],
    mostly_unscored: Collection[Run],
    num_judged: int,
) -> ScoredArm:
    seeds = {seed_of(run) for run, _ in rows}
    lost = [run for run in arm.runs if run.ended_early or run in mostly_unscored]
    judged = [x for r, _ in rows for x in r.judged_evaluations(num_judged)] if num_judged else []
    rewards = [reward for one in judged for rewards in one.rewards.values() for reward in rewards]
    return ScoredArm(
        arm=arm,
        rows=rows,
        lost=tuple(run for run in lost if seed_of(run) not in seeds),
        run_scores=np.array([[table[q] for q in questions] for _, table in rows]).mean(1),
        scores=scores_of(rows, questions),
        num_rollouts=len(rewards),
        num_unscored=rewards.count(None),
    )


def scores_of(rows: Rows, questions: Sequence[Question]) -> Scores:
    """Return the scores of one arm on these questions. Runs of one seed are averaged."""
    by_seed: dict[Hashable, list[list[float]]] = defaultdict(list)
    for run, table in rows:
        by_seed[seed_of(run)].append([table[question] for question in questions])
    envs = sorted({question.env for question in questions})
    strata = np.array([envs.index(question.env) for question in questions], np.int64)
    return Scores(np.array([np.mean(same, axis=0) for same in by_seed.values()]), strata)


def seed_of(run: Run) -> Hashable:
    """Return the seed of a run or, if it is unknown, a value that no other run has."""
    return id(run) if run.seed is None else str(run.seed)


def _versions_in_words(runs: Sequence[Run], num_judged: int) -> str:
    versions = [run.judged_versions(num_judged) for run in runs]
    last, most = as_range([one[-1] for one in versions]), max(map(len, versions))
    name = f"version{'s' * (' ' in last)} {last}"
    return name if most == 1 else f"the last {most} evaluations, up to {name}"


def judged_step(run: Run, measure: str) -> int:
    """Return the last evaluated policy version, or for TRAINING the number of the last step."""
    return run.judged_versions(1)[-1] if measure == HELD_OUT else run.num_steps - 1


def as_range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def mean_scores(
    run: Run, num_judged: int, unscored: Mapping[str, float] | None = None
) -> dict[Question, float]:
    """Return the mean score of each question over the last `num_judged` evaluated versions.

    A question is left out if it has no score in one of these versions. `unscored` maps an
    environment to the reward of its unscored rollouts. By default these rollouts are left out.
    """
    tables = [one.scores_with(unscored or {}) for one in run.judged_evaluations(num_judged)]
    questions = set(tables[0]).intersection(*tables) if tables else set()
    means = {q: sum(table[q] for table in tables) / len(tables) for q in questions}
    return {question: mean for question, mean in means.items() if not isnan(mean)}
