"""Score all arms again under assumptions about unscored rollouts and lost runs.

Scores are rarely missing by chance. Long answers time out, and runs that learn badly fail. Leaving
out such rollouts and runs can favour an arm, so a decision about an arm must be the same under each
assumption about the missing scores.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lab.report.evaluations import Question
from lab.report.run import Run
from lab.report.scoring import NO_QUESTION, TRAINING, Rows, Scoring, Table, mean_scores, scores_of
from lab.report.statistics import Scores


def assumptions(scoring: Scoring) -> Iterator[tuple[str, list[Scores]]]:
    """Yield each assumption about the missing data, and the scores of all arms under it."""
    extremes = _extreme_rewards(scoring)
    if any(one.num_unscored for one in scoring.arms):
        for name, unscored in zip(("lowest", "highest"), extremes, strict=True):
            arms = [
                [(run, mean_scores(run, scoring.num_judged, unscored)) for run in one.runs]
                for one in scoring.arms
            ]
            columns = sorted(set.intersection(*(set(t) for rows in arms for _, t in rows)))
            yield f"unscored rollouts get the {name} reward", [scores_of(a, columns) for a in arms]
    if any(one.lost for one in scoring.arms):
        columns = scoring.questions or [NO_QUESTION]
        ordered = [run for one in scoring.arms for run in one.arm.runs]
        lost = [[(r, _last_scores(scoring, r, extremes[0])) for r in a.lost] for a in scoring.arms]
        best = [[(r, _scores_above_best(a.rows, columns)) for r in a.lost] for a in scoring.arms]
        lower = "their last scores or the lowest reward"
        for name, added in ((lower, lost), ("scores above the best run's", best)):
            # Keep the order of the runs, because sequential decisions depend on this order.
            arms = [
                sorted([*one.rows, *rows], key=lambda row: ordered.index(row[0]))
                for one, rows in zip(scoring.arms, added, strict=True)
            ]
            yield f"lost runs get {name}", [scores_of(rows, columns) for rows in arms]


def _extreme_rewards(scoring: Scoring) -> tuple[dict[str, float], dict[str, float]]:
    lowest: dict[str, float] = {}
    highest: dict[str, float] = {}
    judged = (one for run in scoring.runs for one in run.judged_evaluations(scoring.num_judged))
    for evaluation in judged:
        for question, rewards in evaluation.rewards.items():
            for reward in (reward for reward in rewards if reward is not None):
                lowest[question.env] = min(reward, lowest.get(question.env, reward))
                highest[question.env] = max(reward, highest.get(question.env, reward))
    return lowest, highest


def _last_scores(scoring: Scoring, run: Run, lowest: Mapping[str, float]) -> Table:
    """Return a lost run's last scores. A question without a score gets its env's lowest reward."""
    if scoring.measure == TRAINING:
        reward = run.training_reward
        worst = min(table[NO_QUESTION] for one in scoring.arms for _, table in one.rows)
        return {NO_QUESTION: worst if reward is None else reward}
    means = mean_scores(run, scoring.num_judged, lowest)
    return {question: means.get(question, lowest[question.env]) for question in scoring.questions}


def _scores_above_best(rows: Rows, columns: Sequence[Question]) -> Table:
    """Return 2 * best - mean per question. best: the arm's best run, mean: the mean of its runs."""
    y = np.array([[table[column] for column in columns] for _, table in rows])
    best = y[y.mean(1).argmax()]
    return dict(zip(columns, (2 * best - y.mean(0)).tolist(), strict=True))
