"""What the charts draw: rows of plain numbers, no more of them than an eye can tell apart."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rl.report.arms import Arm
from rl.report.comparison import ArmResult, Comparison
from rl.report.curve import Curve
from rl.report.evaluations import Question
from rl.report.evidence import HEALTH, Evidence
from rl.report.judging import HELD_OUT, curve_of, judged_versions
from rl.report.panel import ALARMS
from rl.report.statistics import Floats
from rl.run.typed import as_typed

Rows = list[dict[str, Any]]

MOST_POINTS = 40  # of a curve
MOST_QUESTIONS = 150  # of the heat map
EXPORTED = "page.html"  # in the folder of a run: what view.py exported there


def forest_rows(comparison: Comparison) -> Rows:
    """An arm a row, with the numbers that stand beside it."""
    rows: Rows = []
    for result in comparison.by_score:
        is_baseline = result is comparison.baseline
        difference = result.difference
        known = isfinite(difference.low)
        rows.append(
            {
                "arm": result.arm.name,
                "score": _short(result.score.value),
                "low": _short(result.score.low),
                "high": _short(result.score.high),
                "difference": None if is_baseline else _short(difference.value),
                "difference_low": _short(difference.low),
                "difference_high": _short(difference.high),
                "verdict": result.verdict or "baseline",
                "difference_text": "" if is_baseline else f"{difference.value:+.3f}",
                "interval_text": f"{difference.low:+.3f} to {difference.high:+.3f}"
                if known
                else "",
                "chance_text": f"{result.chance_better:.0%}" if result.chance_better >= 0 else "",
                "minutes_text": f"{result.minutes:.1f}",
            }
        )
    return rows


def seed_rows(comparison: Comparison, place: Path) -> Rows:
    """A run a row: the dots of the forest plot."""
    return [
        {
            "arm": result.arm.name,
            "seed": str(run.seed),
            "score": _short(float(score)),
            "run": shown_path(run),
            "view": view_command(run, _judged_rollouts(run, comparison.measure)),
            "link": exported(run, place),
        }
        for result in comparison.results
        for run, score in zip(result.runs, result.scores.runs, strict=True)
    ]


def curve_rows(comparison: Comparison, place: Path) -> tuple[Rows, Rows]:
    """Points of every run, and of each arm the median and the range over its runs."""
    points: Rows = []
    bands: Rows = []
    for arm in comparison.arms:
        curves = [(run, _thinned(curve_of(run, comparison.measure))) for run in arm.runs]
        for run, curve in curves:
            points += _points(arm, run, curve, place)
        bands += _band(arm, [curve for run, curve in curves if run.finished])
    return points, bands


def _points(arm: Arm, run: Evidence, curve: Curve, place: Path) -> Iterator[dict[str, Any]]:
    values = zip(curve.steps, curve.seconds, curve.tokens, curve.scores, strict=True)
    for step, seconds, tokens, score in values:
        yield {
            "arm": arm.name,
            "run": shlex.quote(shown_path(run)),  # part of a command there
            "steps": int(step),
            "seconds": round(float(seconds), 1),
            "tokens": int(tokens),
            "score": _short(float(score)),
            "ended": "finished" if run.finished else run.status,
            "link": exported(run, place),
        }


def _band(arm: Arm, curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """Where all of the runs have a point; seconds and tokens are the median run's."""
    if not curves:
        return
    shared = set(curves[0].steps).intersection(*(set(curve.steps) for curve in curves[1:]))
    for step in sorted(shared):
        at = [int(np.flatnonzero(curve.steps == step)[0]) for curve in curves]
        pairs = list(zip(curves, at, strict=True))
        scores = [float(curve.scores[index]) for curve, index in pairs]
        yield {
            "arm": arm.name,
            "steps": int(step),
            "seconds": round(float(np.median([c.seconds[i] for c, i in pairs])), 1),
            "tokens": int(np.median([c.tokens[i] for c, i in pairs])),
            "score": _short(float(np.median(scores))),
            "low": _short(min(scores)),
            "high": _short(max(scores)),
        }


def _thinned(curve: Curve) -> Curve:
    """At most MOST_POINTS of the curve, the first and the last among them."""
    if len(curve.steps) <= MOST_POINTS:
        return curve
    chosen = np.unique(np.linspace(0, len(curve.steps) - 1, MOST_POINTS).round().astype(int))
    return curve.at(chosen)


def health_rows(comparison: Comparison) -> Rows:
    """Median and range over the runs of each arm, of every health metric, in bins of steps."""
    edges = np.linspace(0, max(comparison.most_steps, 1), MOST_POINTS + 1)
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
    """Steps at which a metric that should be zero was not."""
    edges = np.linspace(0, max(comparison.most_steps, 1), MOST_POINTS + 1)
    rows: Rows = []
    for arm in comparison.arms:
        for metric, text in ALARMS.items():
            highest = np.zeros(MOST_POINTS)
            for run in arm.runs:
                values = np.nan_to_num(run.columns[metric])
                bins = _bins(run, edges)
                np.maximum.at(highest, bins, values)
            rows += [
                {"arm": arm.name, "step": int(edges[i]), "alarm": text.format(float(highest[i]))}
                for i in np.flatnonzero(highest > 0)
            ]
    return rows


def _bins(run: Evidence, edges: Floats) -> Any:
    bins = np.searchsorted(edges, run.columns["step"], side="right") - 1
    return bins.clip(0, len(edges) - 2)


def _binned(run: Evidence, metric: str, edges: Floats) -> Floats:
    values = run.columns[metric]
    known = np.isfinite(values)
    bins = _bins(run, edges)[known]
    counts = np.bincount(bins, minlength=len(edges) - 1)
    sums = np.bincount(bins, values[known], minlength=len(edges) - 1)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def time_rows(comparison: Comparison) -> tuple[Rows, Rows]:
    """Mean seconds of a step by arm and activity, and the arms' tokens per second."""
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
            if seconds >= total / 200  # thinner than a line
        ]
        speed = sum(run.tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9)
        speeds.append({"arm": arm.name, "total": _short(total), "speed": f"{speed:,.0f} tokens/s"})
    return rows, speeds


def question_rows(comparison: Comparison, place: Path) -> Rows:
    """Score of each arm on each question, and of all at the first version; widest spread first."""
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
        for result, row in zip(results, means, strict=True):
            rows.append(
                {
                    "arm": result.arm.name,
                    **shared,
                    "score": _short(float(row[index])),
                    "view": _view_question(result, question),
                    "link": exported(result.runs[0], place),
                }
            )
    return rows


AT_FIRST = "at first"


def _first_scores(comparison: Comparison) -> dict[Any, float]:
    """Mean over all runs at their first version, where that is not the judged one."""
    tables = []
    for result in comparison.results:
        for run in result.runs:
            versions = list(run.evaluations)
            if versions and versions[0] not in judged_versions(run, 1):
                tables.append(run.evaluations[versions[0]].scores)
    shared = set(comparison.questions).intersection(*tables) if tables else set()
    means = {q: float(np.mean([table[q] for table in tables])) for q in shared}
    return {question: mean for question, mean in means.items() if isfinite(mean)}


def _view_question(result: ArmResult, question: Question) -> str:
    """Examples of two environments may have one id."""
    env, example = (text.replace("'", "''") for text in (question.env, question.example))
    where = f"source = 'evaluation' AND env = '{env}' AND example = '{example}'"
    return view_command(result.runs[0], where)


def view_command(run: Evidence, where: str) -> str:
    """The command that shows these rollouts of a run."""
    # A shell reads some characters within double quotes, too: an example's id may be anything.
    condition = re.sub(r'([\\"$`])', r"\\\1", where)
    return f'python view.py {shlex.quote(shown_path(run))} where="{condition}"'


def _judged_rollouts(run: Evidence, measure: str) -> str:
    if measure == HELD_OUT:
        return f"source = 'evaluation' AND step = {judged_versions(run, 1)[-1]}"
    return f"step = {max(run.num_steps - 1, 0)}"


def shown_path(run: Evidence) -> str:
    """The run's folder as it is typed from here."""
    return as_typed(run.folder) if run.folder else run.name


def exported(run: Evidence, place: Path) -> str | None:
    """The page that view.py exported into the run's folder, seen from `place`, where it did."""
    page = run.folder / EXPORTED if run.folder else None
    if page is None or not page.is_file():
        return None
    return quote(os.path.relpath(page, place))


def _short(value: float) -> float | None:
    """Four digits: more than can be seen, and a third of the page; None for what is unknown."""
    return float(f"{value:.4g}") if isfinite(value) else None
