"""The forest plot of a report: scores, seeds, intervals and differences of the arms."""

import shlex
from dataclasses import asdict
from typing import Any

import altair as alt

from lab.report.comparison import Comparison
from lab.report.run import Run
from lab.report.scoring import HELD_OUT, judged_step
from lab.report.statistics import BASELINE, BETTER, EQUAL, OPEN, WORSE
from rl.runtime.start_record import program
from rl.runtime.text import relative_path

BASELINE_COLOUR = "#8c8c8c"
COLOURS = {BETTER: "#1e8049", WORSE: "#c93545", OPEN: "#66707f", BASELINE: BASELINE_COLOUR}
COLOURS[EQUAL] = "#2b6cc4"
ROW_HEIGHT = 26  # height of an arm's row in pixels

Chart = Any  # no common base class of altair's charts has all methods that we call


def forest(comparison: Comparison) -> Chart:
    rows = [
        {
            "arm": result.arm.name,
            "score": asdict(result.score),
            "difference": asdict(result.difference),
            "decision": result.decision.partition(" within")[0],
        }
        for result in comparison.by_score
    ]
    order = [row["arm"] for row in rows]
    base = alt.Chart(alt.Data(values=rows))
    dots = alt.Chart(alt.Data(values=_run_rows(comparison)))
    y = alt.Y("arm:N", sort=order, title=None,
              axis=alt.Axis(ticks=False, domain=False, labelPadding=8, labelFontSize=13,
                            labelLimit=260))  # fmt: skip
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    colour = alt.Color("decision:N", legend=None, scale=scale)
    # Vega's default rounds labels by the axis range. If all scores are 0.5, the label would be 1.
    axis = alt.Axis(tickCount=5, title=None, labelExpr="format(datum.value, '~g')")
    x = alt.X("score.value:Q", scale=alt.Scale(zero=False), axis=axis)
    has_interval, is_baseline = "isValid(datum.score.low)", "datum.decision == 'baseline'"
    left = alt.layer(
        base.transform_filter(f"{has_interval} && {is_baseline}")
        .mark_rect(color=BASELINE_COLOUR, opacity=0.16)
        .encode(x="score.low:Q", x2="score.high:Q"),
        base.transform_filter(has_interval)
        .mark_bar(height=5, cornerRadius=2, opacity=0.45)
        .encode(x="score.low:Q", x2="score.high:Q", y=y, color=colour),
        dots.mark_circle(size=34, opacity=0.75, color="#7d8ba1").encode(
            x="score:Q", y=y, tooltip=["arm:N", "seed:N", "score:Q", "view:N"]
        ),
        base.mark_tick(thickness=3, height=15).encode(x=x, y=y, color=colour),
    )
    number = len(comparison.scoring.questions)
    title = f"score on {number} held-out questions" if number else "training reward"
    panels = [left.properties(width=360, title=f"{title}, {comparison.scoring.judged}")]
    if comparison.others:
        panels.append(_differences(comparison, base, alt.Y("arm:N", sort=order, axis=None), colour))
    height = ROW_HEIGHT * len(order)
    panels = [panel.properties(height=height) for panel in panels]
    return alt.hconcat(*panels, spacing=10).resolve_scale(y="shared")


def _differences(comparison: Comparison, base: Chart, y: alt.Y, colour: alt.Color) -> Chart:
    # Let Vega choose the number of digits. With a fixed number, two ticks could look equal.
    axis = alt.Axis(tickCount=5, title=None, format="+~f", labelSeparation=6)
    bars = base.transform_filter("isValid(datum.difference.low)").mark_bar(height=7, cornerRadius=3)
    zero = alt.Chart(alt.Data(values=[{"at": 0}])).mark_rule(strokeDash=[3, 3])
    drawn = alt.layer(
        zero.encode(x="at:Q"),
        bars.encode(x="difference.low:Q", x2="difference.high:Q", y=y, color=colour),
        base.mark_point(filled=True, size=46, opacity=1, stroke="white", strokeWidth=1).encode(
            x=alt.X("difference.value:Q", axis=axis), y=y, color=colour
        ),
    )
    return drawn.properties(width=330, title=f"difference to {comparison.baseline.arm.name}")


def _run_rows(comparison: Comparison) -> list[dict[str, Any]]:
    measure, rows = comparison.scoring.measure, []
    for result in comparison.results:
        for run, score in zip(result.runs, result.run_scores.tolist(), strict=True):
            view = view_command(run, measure, judged_step(run, measure))
            rows.append({"arm": result.arm.name, "seed": run.seed, "score": score, "view": view})
    return rows


def view_command(run: Run, measure: str, step: int) -> str:
    """Return the command that shows the rollouts of a step, or the evaluation of version `step`."""
    source = "evaluation" if measure == HELD_OUT else "training"
    folder = relative_path(run.folder) if run.folder else run.name
    return f"{program('view')} {shlex.quote(folder)} source={source} step={step}"
