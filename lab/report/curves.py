"""The learning curves of a report: scores over the steps, seconds or tokens of the runs."""

from collections.abc import Iterator, Sequence
from typing import Any

import altair as alt
import numpy as np

from lab.report.comparison import Comparison
from lab.report.forest import BASELINE_COLOUR, Chart, view_command
from lab.report.run import LAST_STEPS, Curve
from lab.report.scoring import HELD_OUT, TRAINING

MOST_POINTS = 40  # maximum number of points in a run's curve
COLUMNS, WIDTH = 4, 980  # panels and pixels per row, before page.html adapts them to the window
COLOUR = "#3b7dd8"


def curves(comparison: Comparison) -> dict[str, Any]:
    points, bands = curve_rows(comparison)
    # The layers of a facet must share one data set, so each data row names its layer.
    rows = [*points, *bands]
    names = [arm.name for arm in comparison.arms]
    behind = [row for row in bands if row["arm"] == comparison.baseline.arm.name]
    rows += [{**row, "arm": name, "layer": "baseline"} for name in names for row in behind]
    layers = alt.layer(*_layers(comparison.scoring.measure), data=alt.Data(values=rows))
    choice = alt.binding_radio(options=["steps", "seconds", "tokens"], name="over ")
    progress = alt.param(name="progress", value="steps", bind=choice)
    header = alt.Header(labelFontWeight=600, labelAnchor="start", labelPadding=4)
    facet = alt.Facet("arm:N", sort=names, title=None, header=header)
    columns = min(len(names), COLUMNS)
    panels = layers.properties(width=WIDTH // columns - 20, height=400 // columns + 20)
    chart = panels.facet(facet, columns=columns, spacing=14).add_params(progress)
    spec = chart.to_dict(validate=False)
    for layer in spec["spec"]["layer"]:
        # The axis title is an expression, which Vega-Lite accepts but Altair would reject.
        layer["encoding"]["x"]["axis"]["title"] = {"expr": "progress"}
    return spec


def _layers(measure: str) -> list[Chart]:
    x = alt.X("at:Q", axis=alt.Axis(grid=False, tickCount=4, format="~s"))
    title = ["score on", HELD_OUT]
    if measure == TRAINING:
        title = [TRAINING, f"mean of up to {LAST_STEPS} steps"]
    y, low = (
        alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4))
        for field in ("score", "low")
    )
    base = alt.Chart().transform_calculate(at="datum[progress]")
    band, run, behind = (
        base.transform_filter(f"datum.layer == '{layer}'") for layer in ("band", "run", "baseline")
    )
    unfinished = run.transform_filter("!datum.finished")
    tips = ["arm:N", "run:N", "steps:Q", "seconds:Q", "tokens:Q", "score:Q", "view:N"]
    return [
        behind.mark_line(color=BASELINE_COLOUR, strokeWidth=2, opacity=0.7).encode(x=x, y=y),
        band.mark_area(opacity=0.16, color=COLOUR).encode(x=x, y=low, y2="high:Q"),
        band.mark_line(strokeWidth=2.5, color=COLOUR).encode(x=x, y=y),
        run.mark_circle(size=24, opacity=0.6, color=COLOUR).encode(x=x, y=y, tooltip=tips),
        unfinished.mark_line(strokeDash=[4, 3], strokeWidth=1.2, color=COLOUR).encode(
            x=x, y=y, detail="run:N"
        ),
    ]


def curve_rows(comparison: Comparison) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the curve points of every run, and each arm's median and range over finished runs."""
    points, bands, measure = [], [], comparison.scoring.measure
    for arm in comparison.arms:
        drawn = [
            (run, run.held_out if measure == HELD_OUT else run.training.smoothed(LAST_STEPS))
            for run in arm.runs
        ]
        points += [
            {
                "layer": "run",
                "arm": arm.name,
                "run": run.name,
                "steps": step,
                "seconds": seconds,
                "tokens": tokens,
                "score": score,
                "finished": run.finished,
                "view": view_command(run, measure, int(step)),
            }
            for run, curve in drawn
            for step, seconds, tokens, score in np.stack(curve.columns, 1)[
                _spaced_indices(len(curve.steps))
            ].tolist()
        ]
        bands += _band_rows(arm.name, [curve for run, curve in drawn if run.finished])
    return points, bands


def _band_rows(arm: str, finished: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    shared = sorted(set.intersection(*(set(curve.steps) for curve in finished))) if finished else []
    for step in (shared[index] for index in _spaced_indices(len(shared))):
        at = np.array([np.stack(curve.columns)[:, curve.steps == step][:, 0] for curve in finished])
        _, seconds, tokens, score = np.median(at, 0).tolist()
        low, high = at[:, 3].min().item(), at[:, 3].max().item()
        yield {"layer": "band", "arm": arm, "steps": float(step), "seconds": seconds,
               "tokens": tokens, "score": score, "low": low, "high": high}  # fmt: skip


def _spaced_indices(count: int) -> list[int]:
    """Return at most MOST_POINTS indices below `count`, at about equal distances."""
    return np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int).tolist()
