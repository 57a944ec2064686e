"""The charts of a report, in Vega-Lite by Altair. They have no colours of their own for ink and
paper: the page and the figures give them (`theme`)."""

from typing import Any

import altair as alt

from rl.report.chart_data import (
    AT_FIRST,
    Rows,
    alarm_rows,
    curve_rows,
    forest_rows,
    health_rows,
    question_rows,
    seed_rows,
    time_rows,
)
from rl.report.comparison import Comparison
from rl.report.evidence import HEALTH
from rl.report.statistics import BETTER, UNCLEAR, WORSE

BASELINE_COLOUR = "#8c8c8c"
VERDICTS = {BETTER: "#2a9d5c", WORSE: "#d1495b", UNCLEAR: "#7d8ba1", "baseline": BASELINE_COLOUR}
PALETTE = (
    *("#3b7dd8", "#e07b39", "#2a9d8f", "#b5539c", "#c8a02b", "#6a5acd", "#d1495b", "#4c9f38"),
    *("#1b9fc4", "#a0714f", "#d96fa8", "#7a8f2e"),
)
TIMES = ("#3b7dd8", "#c8a02b", "#b5539c", "#2a9d8f", "#e07b39", "#6a5acd", "#7d8ba1")
ROW = 26  # pixels of an arm
OVERLAID = 4  # arms that one panel of curves can hold
FACET_COLUMNS = 4

Chart = Any  # altair's classes for layers, rows and facets have no common one that types well


def theme(ink: str, quiet: str, line: str) -> dict[str, Any]:
    """The configuration of all charts: colours of text, of quiet text, and of grid lines."""
    font = "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif"
    axis = {
        **{"labelColor": quiet, "titleColor": quiet, "gridColor": line, "domainColor": line},
        **{"tickColor": line, "titleFontWeight": "normal", "labelFontSize": 11},
    }
    title = {"color": ink, "fontSize": 12, "fontWeight": 600, "anchor": "start", "offset": 8,
             "subtitleColor": quiet}  # fmt: skip
    return {
        "background": "transparent",
        "font": font,
        "axis": axis | {"titleFontSize": 11},
        "title": title,
        "header": {"labelColor": ink, "titleColor": quiet, "labelFontSize": 12},
        "legend": {"labelColor": ink, "titleColor": quiet, "symbolStrokeWidth": 3},
        "text": {"color": ink, "fill": ink, "fontSize": 12},
        "view": {"stroke": None},
        "rule": {"color": quiet},
    }


def colours(comparison: Comparison) -> alt.Scale:
    """The same colour for an arm in every chart; the baseline is grey."""
    names = [arm.name for arm in comparison.arms]
    others = [name for name in names if name != comparison.baseline.arm.name]
    by_name = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}
    by_name[comparison.baseline.arm.name] = BASELINE_COLOUR
    return alt.Scale(domain=names, range=[by_name[name] for name in names])


def forest(comparison: Comparison) -> Chart:
    """An arm a row: seeds, interval, difference to the baseline, and the verdict."""
    rows = forest_rows(comparison)
    order = [row["arm"] for row in rows]
    base = alt.Chart(_data(rows))
    y = alt.Y("arm:N", sort=order, title=None, axis=alt.Axis(labelFontSize=13, ticks=False,
              domain=False, labelPadding=8, labelLimit=260))  # fmt: skip
    hidden = alt.Y("arm:N", sort=order, axis=None)
    verdict = alt.Color("verdict:N", legend=None, scale=alt.Scale(
        domain=list(VERDICTS), range=list(VERDICTS.values())))  # fmt: skip
    height = ROW * len(order)
    own = [row for row in rows if row["verdict"] == "baseline" and row["low"] is not None]
    band = alt.Chart(_data(own)).mark_rect(color=BASELINE_COLOUR, opacity=0.16).encode(
        x=alt.X("low:Q"), x2="high:Q"
    )  # fmt: skip
    axis = alt.Axis(tickCount=5, title=None)
    bars = base.mark_bar(height=5, cornerRadius=2, opacity=0.45).encode(
        x=alt.X("low:Q", scale=alt.Scale(zero=False), axis=axis), x2="high:Q", y=y, color=verdict
    )
    means = base.mark_tick(thickness=3, height=15).encode(x="score:Q", y=y, color=verdict)
    seeds = alt.Chart(_data(seed_rows(comparison))).mark_circle(size=34, opacity=0.75).encode(
        x="score:Q", y=y, color=alt.value("#7d8ba1"), href="link:N",
        tooltip=["arm:N", "seed:N", "score:Q", "run:N", "view:N"],
    )  # fmt: skip
    left = alt.layer(band, bars, seeds, means).properties(
        width=300, height=height, title=_score_title(comparison)
    )
    panels = [left]
    if comparison.others:
        panels += [_differences(base, hidden, verdict, comparison, height)]
        texts = [
            ("difference_text", "difference", 62, "right"),
            ("interval_text", "95 % interval", 112, "left"),
            ("chance_text", "P(better)", 62, "right"),
            ("verdict", "verdict", 82, "left"),
        ]
        panels += [_text(base, hidden, *one, height, verdict) for one in texts]
    panels.append(_text(base, hidden, "minutes_text", "minutes", 52, "right", height, verdict))
    return alt.hconcat(*panels, spacing=10).resolve_scale(y="shared")


def _differences(
    base: alt.Chart, y: alt.Y, verdict: alt.Color, comparison: Comparison, height: int
) -> Chart:
    zero = alt.Chart(_data([{"at": 0}])).mark_rule(strokeDash=[3, 3]).encode(x="at:Q")
    axis = alt.Axis(tickCount=5, title=None, format="+.2~f")
    bars = base.mark_bar(height=7, cornerRadius=3).encode(
        x=alt.X("difference_low:Q", axis=axis), x2="difference_high:Q", y=y, color=verdict,
        tooltip=["arm:N", "difference:Q", "interval_text:N", "verdict:N"],
    )  # fmt: skip
    points = base.mark_point(filled=True, size=46, opacity=1).encode(
        x="difference:Q", y=y, color=verdict, stroke=alt.value("white"), strokeWidth=alt.value(1)
    )
    return alt.layer(zero, bars, points).properties(
        width=230, height=height, title=f"difference to {comparison.baseline.arm.name}"
    )


def _text(
    base: alt.Chart, y: alt.Y, field: str, title: str, width: int, align: Any, height: int,
    verdict: alt.Color,
) -> Chart:  # fmt: skip
    at = width if align == "right" else 0
    mark = base.mark_text(align=align, fontSize=12, fontWeight=600 if field == "verdict" else 400)
    drawn = mark.encode(x=alt.value(at), y=y, text=f"{field}:N")
    if field == "verdict":
        drawn = drawn.encode(color=verdict)
    anchor = alt.TitleParams(title, anchor="end" if align == "right" else "start",
                             fontWeight="normal", fontSize=11)  # fmt: skip
    return drawn.properties(width=width, height=height, title=anchor)


def _score_title(comparison: Comparison) -> str:
    number = len(comparison.questions)
    of = f"score on {number} held-out questions" if number else "training reward"
    return f"{of}, {comparison.judged}"


def curves(comparison: Comparison) -> Chart:
    """Score over steps, seconds or tokens; few arms in one panel, many in one each."""
    points, bands = curve_rows(comparison)
    progress = alt.param(
        name="progress",
        value="steps",
        bind=alt.binding_radio(options=["steps", "seconds", "tokens"], name="over "),
    )
    if len(comparison.arms) <= OVERLAID:
        chart = _overlaid(comparison, points, bands)
    else:
        chart = _side_by_side(comparison, points, bands)
    return chart.add_params(progress)


def _at(rows: Rows) -> alt.Chart:
    return alt.Chart(_data(rows)).transform_calculate(at="datum[progress]")


def _x() -> alt.X:
    return alt.X("at:Q", title=None, axis=alt.Axis(grid=False, tickCount=4, format="~s"))


def _y(field: str = "score:Q") -> alt.Y:
    return alt.Y(field, title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4))


_TIPS = ["arm:N", "run:N", "steps:Q", "seconds:Q", "tokens:Q", "score:Q", "view:N"]


def _dots(rows: Rows, colour: Any, size: int) -> alt.Chart:
    command = "'python view.py ' + datum.run + ' where=\"step=' + datum.steps + '\"'"
    chart = _at(rows).transform_calculate(view=command)
    return chart.mark_circle(size=size, opacity=0.6).encode(
        x=_x(), y=_y(), color=colour, tooltip=_TIPS, href="link:N"
    )


def _unfinished(rows: Rows, colour: Any) -> alt.Chart:
    failed = [row for row in rows if row["ended"] != "finished"]
    return (
        _at(failed)
        .mark_line(strokeDash=[4, 3], strokeWidth=1.2)
        .encode(x=_x(), y=_y(), detail="run:N", color=colour)
    )


def _overlaid(comparison: Comparison, points: Rows, bands: Rows) -> Chart:
    colour = alt.Color("arm:N", scale=colours(comparison), title=None,
                       legend=alt.Legend(orient="top", labelFontSize=13))  # fmt: skip
    area = _at(bands).mark_area(opacity=0.15).encode(
        x=_x(), y=_y("low:Q"), y2="high:Q", color=colour
    )  # fmt: skip
    line = _at(bands).mark_line(strokeWidth=2.5).encode(x=_x(), y=_y(), color=colour)
    layers = [area, line, _unfinished(points, colour), _dots(points, colour, 26)]
    return alt.layer(*layers).properties(width=900, height=300)


def _side_by_side(comparison: Comparison, points: Rows, bands: Rows) -> Chart:
    """A panel an arm, the baseline's median in grey behind each."""
    names = [result.arm.name for result in comparison.by_score]
    names += [arm.name for arm in comparison.arms if arm.name not in names]
    # Layers of a facet share one data set: rows say which layer they belong to.
    behind = [row for row in bands if row["arm"] == comparison.baseline.arm.name]
    rows = [{**row, "layer": "band"} for row in bands]
    rows += [{**row, "arm": name, "layer": "baseline"} for name in names for row in behind]
    rows += [{**row, "layer": "run"} for row in points]
    colour = alt.Color("arm:N", scale=colours(comparison), legend=None)
    base = alt.Chart().transform_calculate(at="datum[progress]")
    own = base.transform_filter("datum.layer == 'band'")
    command = "'python view.py ' + datum.run + ' where=\"step=' + datum.steps + '\"'"
    run = base.transform_filter("datum.layer == 'run'").transform_calculate(view=command)
    failed = run.transform_filter("datum.ended != 'finished'")
    layers = alt.layer(
        base.transform_filter("datum.layer == 'baseline'")
        .mark_line(color=BASELINE_COLOUR, strokeWidth=2, opacity=0.7)
        .encode(x=_x(), y=_y()),
        own.mark_area(opacity=0.18).encode(x=_x(), y=_y("low:Q"), y2="high:Q", color=colour),
        own.mark_line(strokeWidth=2.5).encode(x=_x(), y=_y(), color=colour),
        failed.mark_line(strokeDash=[4, 3], strokeWidth=1.2).encode(
            x=_x(), y=_y(), detail="run:N", color=colour
        ),
        run.mark_circle(size=22, opacity=0.6).encode(
            x=_x(), y=_y(), color=colour, tooltip=_TIPS, href="link:N"
        ),
        data=_data(rows),
    ).properties(width=235, height=120)
    header = alt.Header(labelFontWeight=600, labelAnchor="start", labelPadding=4)
    facet = alt.Facet("arm:N", sort=names, title=None, header=header)
    return layers.facet(facet, columns=FACET_COLUMNS, spacing=14)


def health(comparison: Comparison) -> Chart:
    """A column a metric, a strip an arm; the last column has a tick for every alarm."""
    rows, alarms = health_rows(comparison), alarm_rows(comparison)
    names = _names(comparison)
    place = {name: len(names) - 1 - index for index, name in enumerate(names)}
    labels = [{"arm": name, "at": place[name] + 0.5} for name in names]
    text = alt.Chart(_data(labels)).mark_text(align="right", fontSize=13, limit=200)
    y = alt.Y("at:Q", axis=None, scale=alt.Scale(domain=[0, len(names)]))
    named = text.encode(x=alt.value(110), y=y, text="arm:N")
    columns = [named.properties(width=110, height=ROW * len(names))]
    known = {row["metric"] for row in rows}
    for metric in (metric for metric in HEALTH if metric in known):
        of_metric = [row for row in rows if row["metric"] == metric]
        columns.append(_strips(of_metric, metric, place, comparison.most_steps))
    if alarms:
        columns.append(_alarms(comparison, alarms, place))
    return alt.hconcat(*columns, spacing=12)


def _strips(rows: Rows, metric: str, place: dict[str, int], most_steps: int) -> Chart:
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
    base = alt.Chart(_data(drawn))
    area = base.mark_area(opacity=0.3, color=PALETTE[0]).encode(
        x=x, y=bottom, y2="high_at:Q", detail="arm:N"
    )
    line = base.mark_line(strokeWidth=1.4, color=PALETTE[0]).encode(
        x=x, y=middle, detail="arm:N", tooltip=["arm:N", "step:Q", "middle:Q", "low:Q", "high:Q"]
    )
    title = alt.TitleParams(metric, subtitle=f"{low:.3g} to {high:.3g}", subtitleFontSize=10)
    return alt.layer(area, line).properties(width=94, height=ROW * len(place), title=title)


def _alarms(comparison: Comparison, rows: Rows, place: dict[str, int]) -> Chart:
    drawn = [{**row, "at": place[row["arm"]] + 0.5} for row in rows]
    x = alt.X("step:Q", axis=None, scale=alt.Scale(domain=[0, comparison.most_steps]))
    y = alt.Y("at:Q", axis=None, scale=alt.Scale(domain=[0, len(place)]))
    ticks = alt.Chart(_data(drawn)).mark_tick(
        orient="vertical", color=VERDICTS[WORSE], thickness=2, height=0.7 * ROW
    )
    title = alt.TitleParams("alarms", subtitle="should be none", subtitleFontSize=10)
    return ticks.encode(x=x, y=y, tooltip=["arm:N", "step:Q", "alarm:N"]).properties(
        width=94, height=ROW * len(place), title=title
    )


def times(comparison: Comparison) -> Chart:
    """Seconds of a step by activity, and tokens per second."""
    rows, speeds = time_rows(comparison)
    names = _names(comparison)
    y = alt.Y("arm:N", sort=names, title=None, axis=alt.Axis(labelFontSize=13, ticks=False,
              domain=False, labelPadding=8, labelLimit=260))  # fmt: skip
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["activity"]] = totals.get(row["activity"], 0) + row["seconds"]
    activities = sorted(totals, key=lambda name: -totals[name])
    scale = alt.Scale(domain=activities, range=list(TIMES))
    place = {name: index for index, name in enumerate(activities)}
    rows = [{**row, "place": place[row["activity"]]} for row in rows]
    bars = alt.Chart(_data(rows)).mark_bar(height=14).encode(
        x=alt.X("seconds:Q", title="seconds per step", axis=alt.Axis(tickCount=6)),
        y=y, order="place:Q", tooltip=["arm:N", "activity:N", "seconds:Q"],
        color=alt.Color("activity:N", scale=scale, title=None, legend=alt.Legend(orient="top")),
    )  # fmt: skip
    text = alt.Chart(_data(speeds)).mark_text(align="left", dx=6, fontSize=11).encode(
        x="total:Q", y=y, text="speed:N"
    )  # fmt: skip
    return alt.layer(bars, text).properties(width=760, height=ROW * len(names))


def questions(comparison: Comparison) -> Chart:
    """A column a question, a row an arm; where arms differ most comes first."""
    rows = question_rows(comparison)
    has_first = any(row["arm"] == AT_FIRST for row in rows)
    names = [AT_FIRST] * has_first + [result.arm.name for result in comparison.by_score]
    most = max(row["place"] for row in rows)
    return (
        alt.Chart(_data(rows))
        .mark_rect()
        .encode(
            x=alt.X("place:O", axis=None),
            y=alt.Y("arm:N", sort=names, title=None, axis=alt.Axis(
                labelFontSize=13, ticks=False, domain=False, labelPadding=8, labelLimit=260)),
            color=alt.Color("score:Q", title="score", scale=alt.Scale(scheme="viridis"),
                            legend=alt.Legend(orient="top", gradientLength=160,
                                              gradientThickness=8, titleOrient="left")),
            href="link:N",
            tooltip=["question:N", "arm:N", "score:Q", "example:N", "view:N"],
        )
        .properties(width=max(320, min(900, 14 * most)), height=22 * len(names))
    )  # fmt: skip


def _names(comparison: Comparison) -> list[str]:
    """Arms in the order of the forest plot, those without a score last."""
    names = [result.arm.name for result in comparison.by_score]
    return names + [arm.name for arm in comparison.arms if arm.name not in names]


def _data(rows: Rows) -> alt.InlineData:
    """The rows as they are: through a data frame Altair would load pandas."""
    return alt.InlineData(values=rows)
