"""Charts of a report over the steps of its runs: scores, and the health of training."""

from typing import Any

import altair as alt

from lab.report.chart_rows import Rows, alarm_rows, curve_rows, health_rows
from lab.report.charts import (
    BASELINE_COLOUR,
    DECISIONS,
    LINK,
    NARROW,
    NARROW_NAME,
    PALETTE,
    ROW,
    Canvas,
    Chart,
)
from lab.report.run import HEALTH, LAST_STEPS
from lab.report.scoring import HELD_OUT, TRAINING
from lab.report.statistics import WORSE

OVERLAID = 4  # the most arms in one panel
FACET_COLUMNS = 4
NARROW_COLUMNS = 2  # of the health of runs
NARROW_PANEL = NARROW_NAME + NARROW - 50  # pixels beside the labels of an axis
# Vega builds the commands, because one per point would be half of the page.
_VIEW = "'python view.py ' + datum.run + ' where=\"{}step = ' + datum.steps + '\"'"


def curves(canvas: Canvas) -> Chart:
    """Return scores over steps, seconds or tokens: one panel for few arms, else one per arm.

    The panel of an arm also shows the baseline's median in grey.
    """
    points, bands = curve_rows(canvas.comparison, canvas.folder)
    names, few = canvas.names, len(canvas.comparison.arms) <= OVERLAID
    # The layers of a facet must share one data set, so each row names its layer.
    rows = [{**row, "layer": "band"} for row in bands]
    rows += [{**row, "layer": "run"} for row in points]
    if not few:
        baseline = canvas.comparison.baseline.arm.name
        behind = [row for row in bands if row["arm"] == baseline]
        rows += [{**row, "arm": name, "layer": "baseline"} for name in names for row in behind]
    has_unfinished = any(row["ended"] != "finished" for row in points)
    layers = alt.layer(*_layers(canvas, few, has_unfinished), data=canvas.data(rows))
    progress = alt.param(
        name="progress",
        value="steps",
        bind=alt.binding_radio(options=["steps", "seconds", "tokens"], name="over "),
    )
    if few:
        width, height = (NARROW_PANEL, 200) if canvas.narrow else (940, 300)
        return layers.properties(width=width, height=height).add_params(progress)
    header = alt.Header(labelFontWeight=600, labelAnchor="start", labelPadding=4)
    facet = alt.Facet("arm:N", sort=names, title=None, header=header)
    panels = layers.properties(width=NARROW_PANEL if canvas.narrow else 235, height=120)
    columns = 1 if canvas.narrow else FACET_COLUMNS
    return panels.facet(facet, columns=columns, spacing=14).add_params(progress)


def _layers(canvas: Canvas, few: bool, has_unfinished: bool) -> list[alt.Chart]:
    measure = canvas.comparison.measure
    source = "source = \\'evaluation\\' AND " if measure == HELD_OUT else ""
    legend = alt.Legend(
        orient="top", labelFontSize=13, symbolOpacity=1, columns=2 if canvas.narrow else OVERLAID
    )
    colour: Any = alt.Color(
        "arm:N", scale=canvas.colours, title=None, legend=legend if few else None
    )
    x = alt.X("at:Q", title=None, axis=alt.Axis(grid=False, tickCount=4, format="~s"))
    # Two lines, because a panel is not high.
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
    tips = ["arm:N", "run:N", "steps:Q", "seconds:Q", "tokens:Q", "score:Q", "view:N"]
    layers = [
        band.mark_area(opacity=0.16).encode(x=x, y=low, y2="high:Q", color=colour),
        band.mark_line(strokeWidth=2.5).encode(x=x, y=y, color=colour),
        run.transform_calculate(view=_VIEW.format(source))
        .mark_circle(size=24, opacity=0.6)
        .encode(x=x, y=y, color=colour, tooltip=tips, href=LINK),
    ]
    if has_unfinished:
        failed = run.transform_filter("datum.ended != 'finished'")
        dashed = failed.mark_line(strokeDash=[4, 3], strokeWidth=1.2)
        layers.append(dashed.encode(x=x, y=y, detail="run:N", color=colour))
    if not few:
        grey = behind.mark_line(color=BASELINE_COLOUR, strokeWidth=2, opacity=0.7)
        layers.insert(0, grey.encode(x=x, y=y))
    return layers


def health(canvas: Canvas) -> Chart:
    """Return a column per metric and a strip per arm; a tick in the last column is an alarm."""
    rows, alarms, names = (
        health_rows(canvas.comparison),
        alarm_rows(canvas.comparison),
        canvas.names,
    )
    place = {name: len(names) - 1 - index for index, name in enumerate(names)}
    labels = [{"arm": name, "at": place[name] + 0.5} for name in names]
    size, limit = (11, NARROW_NAME) if canvas.narrow else (13, 200)
    text = alt.Chart(canvas.data(labels)).mark_text(align="right", fontSize=size, limit=limit)
    y = alt.Y("at:Q", axis=None, scale=alt.Scale(domain=[0, len(names)]))
    named = text.encode(x=alt.value(110), y=y, text="arm:N")
    named = named.properties(width=110, height=ROW * len(names))
    columns = []
    for metric in HEALTH:
        if of_metric := [row for row in rows if row["metric"] == metric]:
            columns.append(_strips(canvas, of_metric, metric, place))
    if alarms:
        columns.append(_alarms(canvas, alarms, place))
    across = NARROW_COLUMNS if canvas.narrow else len(columns)
    lines = [columns[at : at + across] for at in range(0, len(columns), across)]
    return alt.vconcat(*(alt.hconcat(named, *line, spacing=12) for line in lines), spacing=16)


def _strips(canvas: Canvas, rows: Rows, metric: str, place: dict[str, int]) -> Chart:
    """Return one chart of all arms, with each value scaled into the strip of its arm."""
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    scale = 0.8 / (high - low or 1.0)
    drawn = [
        {**row, **{f"{key}_at": round(place[row["arm"]] + 0.1 + (row[key] - low) * scale, 3)
                   for key in ("low", "middle", "high")}}
        for row in rows
    ]  # fmt: skip
    x, strips = _steps_axis(canvas), alt.Scale(domain=[0, len(place)])
    middle, bottom = (alt.Y(f"{key}_at:Q", axis=None, scale=strips) for key in ("middle", "low"))
    base = alt.Chart(canvas.data(drawn))
    area = base.mark_area(opacity=0.3, color=PALETTE[0]).encode(
        x=x, y=bottom, y2="high_at:Q", detail="arm:N"
    )
    line = base.mark_line(strokeWidth=1.4, color=PALETTE[0]).encode(
        x=x, y=middle, detail="arm:N", tooltip=["arm:N", "step:Q", "middle:Q", "low:Q", "high:Q"]
    )
    return _in_column(alt.layer(area, line), metric, f"{low:.3g} to {high:.3g}", place)


def _alarms(canvas: Canvas, rows: Rows, place: dict[str, int]) -> Chart:
    drawn = [{**row, "at": place[row["arm"]] + 0.5} for row in rows]
    y = alt.Y("at:Q", axis=None, scale=alt.Scale(domain=[0, len(place)]))
    ticks = alt.Chart(canvas.data(drawn)).mark_tick(
        orient="vertical", color=DECISIONS[WORSE], thickness=2, height=0.7 * ROW
    )
    ticks = ticks.encode(x=_steps_axis(canvas), y=y, tooltip=["arm:N", "step:Q", "alarm:N"])
    return _in_column(ticks, "alarms", "should be none", place)


def _steps_axis(canvas: Canvas) -> alt.X:
    return alt.X("step:Q", axis=None, scale=alt.Scale(domain=[0, canvas.comparison.most_steps]))


def _in_column(chart: Chart, title: str, subtitle: str, place: dict[str, int]) -> Chart:
    head = alt.TitleParams(title, subtitle=subtitle, subtitleFontSize=10)
    return chart.properties(width=94, height=ROW * len(place), title=head)
