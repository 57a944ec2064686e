"""The data of the charts: rows of plain numbers, no more of them than a reader can distinguish."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from lab.report.comparison import Comparison
from lab.report.curve import Curve
from lab.report.evaluations import Question
from lab.report.run import HEALTH, Run
from lab.report.scoring import HELD_OUT, curve_of
from lab.report.statistics import Floats
from rl.runtime.text import relative_path
from rl.terminal.panel import ALARMS

Rows = list[dict[str, Any]]

MOST_POINTS = 40  # of a curve
MOST_QUESTIONS = 150  # of the heat map
EXPORTED = "page.html"  # written by view.py into the folder of a run
AT_FIRST = "at first"


def forest_rows(comparison: Comparison) -> Rows:
    """Return a row per arm with its numbers."""
    rows: Rows = []
    for result in comparison.by_score:
        is_other, gain = result is not comparison.baseline, result.difference
        ends = f"{gain.low:+.3f} to {gain.high:+.3f}" if isfinite(gain.low) else ""
        rows.append(
            {
                "arm": result.arm.name,
                "score": _short(result.score.value),
                "low": _short(result.score.low),
                "high": _short(result.score.high),
                "difference": _short(gain.value) if is_other else None,
                "difference_low": _short(gain.low),
                "difference_high": _short(gain.high),
                "decision": result.decision or "baseline",
                "difference_text": f"{gain.value:+.3f}" if is_other else "",
                "interval_text": ends,
                "chance_text": f"{result.chance_better:.0%}" if result.chance_better >= 0 else "",
                "minutes_text": f"{result.minutes:.1f}",
            }
        )
    return rows


def seed_rows(comparison: Comparison, folder: Path) -> Rows:
    """Return a row per run: the dots of the forest plot."""
    rows: Rows = []
    for result in comparison.results:
        for run, score in zip(result.runs, result.scores.runs, strict=True):
            where = f"step = {max(run.num_steps - 1, 0)}"
            if comparison.measure == HELD_OUT:
                where = f"source = 'evaluation' AND step = {run.judged_versions(1)[-1]}"
            rows.append(
                {
                    "arm": result.arm.name,
                    "seed": str(run.seed),
                    "score": _short(float(score)),
                    "run": shown_path(run),
                    "view": view_command(run, where),
                    "link": _exported(run, folder),
                }
            )
    return rows


def curve_rows(comparison: Comparison, folder: Path) -> tuple[Rows, Rows]:
    """Return the points of every run, and for each arm median and range over its runs."""
    points: Rows = []
    bands: Rows = []
    for arm in comparison.arms:
        curves = [(run, _thinned(curve_of(run, comparison.measure))) for run in arm.runs]
        for run, curve in curves:
            values = zip(curve.steps, curve.seconds, curve.tokens, curve.scores, strict=True)
            points += [
                {
                    "arm": arm.name,
                    "run": shlex.quote(shown_path(run)),  # the page inserts it into a command
                    "steps": int(step),
                    "seconds": round(float(seconds), 1),
                    "tokens": int(tokens),
                    "score": _short(float(score)),
                    "ended": run.status,
                    "link": _exported(run, folder),
                }
                for step, seconds, tokens, score in values
            ]
        bands += _band(arm.name, [curve for run, curve in curves if run.finished])
    return points, bands


def _band(arm: str, curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """Yield median and range at the steps that all runs have."""
    if not curves:
        return
    shared = set(curves[0].steps).intersection(*(set(curve.steps) for curve in curves[1:]))
    for step in sorted(shared):
        at = [curve.at(curve.steps == step) for curve in curves]
        scores = [float(point.scores[0]) for point in at]
        yield {
            "arm": arm,
            "steps": int(step),
            "seconds": round(float(np.median([point.seconds[0] for point in at])), 1),
            "tokens": int(np.median([point.tokens[0] for point in at])),
            "score": _short(float(np.median(scores))),
            "low": _short(min(scores)),
            "high": _short(max(scores)),
        }


def _thinned(curve: Curve) -> Curve:
    """Return at most MOST_POINTS of the curve, including the first and the last."""
    if len(curve.steps) <= MOST_POINTS:
        return curve
    return curve.at(
        np.unique(np.linspace(0, len(curve.steps) - 1, MOST_POINTS).round().astype(int))
    )


def health_rows(comparison: Comparison) -> Rows:
    """Return median and range over the runs of each arm, for each health metric, in bins."""
    edges = _edges(comparison)
    rows: Rows = []
    for arm in comparison.arms:
        for label, metric in HEALTH.items():
            means = np.array([_binned(run, metric, edges) for run in arm.runs])
            for index in np.flatnonzero(np.isfinite(means).any(0)):
                values = means[:, index][np.isfinite(means[:, index])]
                rows.append(
                    {
                        "arm": arm.name,
                        "metric": label,
                        "step": int(edges[index]),
                        "middle": _short(float(np.median(values))),
                        "low": _short(float(values.min())),
                        "high": _short(float(values.max())),
                    }
                )
    return rows


def alarm_rows(comparison: Comparison) -> Rows:
    """Return the steps at which a metric that should be zero was not."""
    edges = _edges(comparison)
    rows: Rows = []
    for arm in comparison.arms:
        for metric, text in ALARMS.items():
            highest = np.zeros(MOST_POINTS)
            for run in arm.runs:
                np.maximum.at(highest, _bins(run, edges), np.nan_to_num(run.columns[metric]))
            rows += [
                {"arm": arm.name, "step": int(edges[i]), "alarm": text.format(float(highest[i]))}
                for i in np.flatnonzero(highest > 0)
            ]
    return rows


def _edges(comparison: Comparison) -> Floats:
    return np.linspace(0, max(comparison.most_steps, 1), MOST_POINTS + 1)


def _bins(run: Run, edges: Floats) -> Any:
    bins = np.searchsorted(edges, run.columns["step"], side="right") - 1
    return bins.clip(0, len(edges) - 2)


def _binned(run: Run, metric: str, edges: Floats) -> Floats:
    values = run.columns[metric]
    known = np.isfinite(values)
    bins = _bins(run, edges)[known]
    counts = np.bincount(bins, minlength=len(edges) - 1)
    sums = np.bincount(bins, values[known], minlength=len(edges) - 1)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def time_rows(comparison: Comparison) -> tuple[Rows, Rows]:
    """Return mean seconds of a step by arm and activity, and the arms' tokens per second."""
    rows: Rows = []
    speeds: Rows = []
    for arm in comparison.arms:
        runs = [run for run in arm.runs if run.activities]
        if not runs:
            continue
        names = dict.fromkeys(name for run in runs for name in run.activities)
        means = {n: float(np.mean([run.activities.get(n, 0.0) for run in runs])) for n in names}
        total = sum(means.values())
        rows += [
            {"arm": arm.name, "activity": name.replace("_", " "), "seconds": _short(seconds)}
            for name, seconds in means.items()
            if seconds >= total / 200  # a shorter bar would be invisible
        ]
        speed = sum(run.tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9)
        speeds.append({"arm": arm.name, "total": _short(total), "speed": f"{speed:,.0f} tokens/s"})
    return rows, speeds


def question_rows(comparison: Comparison, folder: Path) -> Rows:
    """Return the score of each arm on each question, the largest differences first.

    A further arm, AT_FIRST, is the mean over all runs at their first version.
    """
    results = comparison.by_score
    means = np.array([result.scores.y.mean(0) for result in results])  # [A, Q]
    order = np.lexsort((means.mean(0), -np.ptp(means, axis=0)))[:MOST_QUESTIONS]
    rows: Rows = []
    first = _first_scores(comparison)
    for rank, index in enumerate(order):
        question = comparison.questions[index]
        shared = {"place": rank + 1, "question": question.text, "example": question.example}
        if question in first:
            rows.append({"arm": AT_FIRST, **shared, "score": _short(first[question]), "view": ""})
        # Examples of two environments may have the same id.
        env, example = (text.replace("'", "''") for text in (question.env, question.example))
        where = f"source = 'evaluation' AND env = '{env}' AND example = '{example}'"
        for result, row in zip(results, means, strict=True):
            rows.append(
                {
                    "arm": result.arm.name,
                    **shared,
                    "score": _short(float(row[index])),
                    "view": view_command(result.runs[0], where),
                    "link": _exported(result.runs[0], folder),
                }
            )
    return rows


def _first_scores(comparison: Comparison) -> dict[Question, float]:
    """Return the mean over all runs at their first version, unless that is the judged one."""
    tables = []
    for run in (run for result in comparison.results for run in result.runs):
        versions = list(run.evaluations)
        if versions and versions[0] not in run.judged_versions(1):
            tables.append(run.evaluations[versions[0]].scores)
    shared = set(comparison.questions).intersection(*tables) if tables else set()
    means = {q: float(np.mean([table[q] for table in tables])) for q in shared}
    return {question: mean for question, mean in means.items() if isfinite(mean)}


def view_command(run: Run, where: str) -> str:
    """Return the command that shows these rollouts of a run."""
    # Escape what a shell expands within double quotes, because an example's id may be any text.
    condition = re.sub(r'([\\"$`])', r"\\\1", where)
    return f'python view.py {shlex.quote(shown_path(run))} where="{condition}"'


def shown_path(run: Run) -> str:
    """Return the run's folder, relative to the working directory if it is inside it."""
    return relative_path(run.folder) if run.folder else run.name


def _exported(run: Run, folder: Path) -> str | None:
    """Return a link from `folder` to the page that view.py exported, None if there is none."""
    page = run.folder / EXPORTED if run.folder else None
    if page is None or not page.is_file():
        return None
    return quote(os.path.relpath(page, folder))


def _short(value: float) -> float | None:
    """Return four digits, which keeps the page small; None if the value is unknown."""
    return float(f"{value:.4g}") if isfinite(value) else None
