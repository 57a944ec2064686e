"""The charts of a report that go over the run: scores, and the health of training."""

from typing import Any

import altair as alt

from rl.report.chart_data import Rows, alarm_rows, curve_rows, health_rows
from rl.report.charts import (
    BASELINE_COLOUR,
    LINK,
    NARROW,
    NARROW_NAME,
    PALETTE,
    ROW,
    VERDICTS,
    Chart,
    Datasets,
    colours,
    names_of,
)
from rl.report.comparison import Comparison
from rl.report.evidence import HEALTH, LAST_STEPS
from rl.report.judging import HELD_OUT, TRAINING
from rl.report.statistics import WORSE

OVERLAID = 4  # arms that one panel can hold
FACET_COLUMNS = 4
NARROW_COLUMNS = 2  # of the health of runs
NARROW_PANEL = NARROW_NAME + NARROW - 50  # pixels beside the labels of an axis
# In Vega's own language: a command for each of thousands of points would be half of the page.
_VIEW = "'python view.py ' + datum.run + ' where=\"{}step = ' + datum.steps + '\"'"


def curves(comparison: Comparison, data: Datasets, *, narrow: bool = False) -> Chart:
    """Score over steps, seconds or tokens; few arms in one panel, many in one each.

    A panel each has the baseline's median in grey behind it.
    """
    points, bands = curve_rows(comparison, data.place)
    names, few = names_of(comparison), len(comparison.arms) <= OVERLAID
    # The layers of a facet share one data set: its rows say which layer they belong to.
    rows = [{**row, "layer": "band"} for row in bands]
    rows += [{**row, "layer": "run"} for row in points]
    if not few:
        behind = [row for row in bands if row["arm"] == comparison.baseline.arm.name]
        rows += [{**row, "arm": name, "layer": "baseline"} for name in names for row in behind]
    legend = alt.Legend(
        orient="top", labelFontSize=13, symbolOpacity=1, columns=2 if narrow else OVERLAID
    )
    colour = alt.Color(
        "arm:N", scale=colours(comparison), title=None, legend=legend if few else None
    )
    has_unfinished = any(row["ended"] != "finished" for row in points)
    layers = alt.layer(*_layers(comparison, colour, few, has_unfinished), data=data(rows))
    progress = alt.param(
        name="progress",
        value="steps",
        bind=alt.binding_radio(options=["steps", "seconds", "tokens"], name="over "),
    )
    if few:
        width, height = (NARROW_PANEL, 200) if narrow else (940, 300)
        return layers.properties(width=width, height=height).add_params(progress)
    header = alt.Header(labelFontWeight=600, labelAnchor="start", labelPadding=4)
    facet = alt.Facet("arm:N", sort=names, title=None, header=header)
    panels = layers.properties(width=NARROW_PANEL if narrow else 235, height=120)
    columns = 1 if narrow else FACET_COLUMNS
    return panels.facet(facet, columns=columns, spacing=14).add_params(progress)


def _layers(
    comparison: Comparison, colour: Any, few: bool, has_unfinished: bool
) -> list[alt.Chart]:
    source = "source = \\'evaluation\\' AND " if comparison.measure == HELD_OUT else ""
    x = alt.X("at:Q", title=None, axis=alt.Axis(grid=False, tickCount=4, format="~s"))
    # Two lines: a panel is not high.
    title = ["score on", HELD_OUT]
    if comparison.measure == TRAINING:
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


def health(comparison: Comparison, data: Datasets, *, narrow: bool = False) -> Chart:
    """A column a metric, a strip an arm; the last column has a tick for every alarm."""
    rows, alarms = health_rows(comparison), alarm_rows(comparison)
    names = names_of(comparison)
    place = {name: len(names) - 1 - index for index, name in enumerate(names)}
    labels = [{"arm": name, "at": place[name] + 0.5} for name in names]
    size, limit = (11, NARROW_NAME) if narrow else (13, 200)
    text = alt.Chart(data(labels)).mark_text(align="right", fontSize=size, limit=limit)
    y = alt.Y("at:Q", axis=None, scale=alt.Scale(domain=[0, len(names)]))
    named = text.encode(x=alt.value(110), y=y, text="arm:N")
    named = named.properties(width=110, height=ROW * len(names))
    columns = []
    known = {row["metric"] for row in rows}
    for metric in (metric for metric in HEALTH if metric in known):
        of_metric = [row for row in rows if row["metric"] == metric]
        columns.append(_strips(data, of_metric, metric, place, comparison.most_steps))
    if alarms:
        columns.append(_alarms(comparison, data, alarms, place))
    across = NARROW_COLUMNS if narrow else len(columns)
    lines = [columns[at : at + across] for at in range(0, len(columns), across)]
    return alt.vconcat(*(alt.hconcat(named, *line, spacing=12) for line in lines), spacing=16)


def _strips(
    data: Datasets, rows: Rows, metric: str, place: dict[str, int], most_steps: int
) -> Chart:
    """All arms below each other in one chart, each value scaled into its arm's strip."""
    low, high = min(row["low"] for row in rows), max(row["high"] for row in rows)
    scale = 0.8 / (high - low or 1.0)
    drawn = [
        {**row, **{f"{key}_at": round(place[row["arm"]] + 0.1 + (row[key] - low) * scale, 3)
                   for key in ("low", "middle", "high")}}
        for row in rows
    ]  # fmt: skip
    x = alt.X("step:Q", axis=None, scale=alt.Scale(domain=[0, most_steps]))
    strips = alt.Scale(domain=[0, len(place)])
    middle, bottom = (alt.Y(f"{key}_at:Q", axis=None, scale=strips) for key in ("middle", "low"))
    base = alt.Chart(data(drawn))
    area = base.mark_area(opacity=0.3, color=PALETTE[0]).encode(
        x=x, y=bottom, y2="high_at:Q", detail="arm:N"
    )
    line = base.mark_line(strokeWidth=1.4, color=PALETTE[0]).encode(
        x=x, y=middle, detail="arm:N", tooltip=["arm:N", "step:Q", "middle:Q", "low:Q", "high:Q"]
    )
    title = alt.TitleParams(metric, subtitle=f"{low:.3g} to {high:.3g}", subtitleFontSize=10)
    return alt.layer(area, line).properties(width=94, height=ROW * len(place), title=title)


def _alarms(comparison: Comparison, data: Datasets, rows: Rows, place: dict[str, int]) -> Chart:
    drawn = [{**row, "at": place[row["arm"]] + 0.5} for row in rows]
    x = alt.X("step:Q", axis=None, scale=alt.Scale(domain=[0, comparison.most_steps]))
    y = alt.Y("at:Q", axis=None, scale=alt.Scale(domain=[0, len(place)]))
    ticks = alt.Chart(data(drawn)).mark_tick(
        orient="vertical", color=VERDICTS[WORSE], thickness=2, height=0.7 * ROW
    )
    title = alt.TitleParams("alarms", subtitle="should be none", subtitleFontSize=10)
    return ticks.encode(x=x, y=y, tooltip=["arm:N", "step:Q", "alarm:N"]).properties(
        width=94, height=ROW * len(place), title=title
    )
