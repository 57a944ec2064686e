"""The charts of a report, in Vega-Lite by Altair: verdicts, times, questions.

Charts have no colours of their own for ink and paper: the page and the figures give them (`theme`).
Each is drawn `narrow`, too, for a window of a phone's width: what stands side by side is stacked.
"""

from pathlib import Path
from typing import Any

import altair as alt

from rl.report.chart_data import (
    AT_FIRST,
    Rows,
    forest_rows,
    question_rows,
    seed_rows,
    time_rows,
)
from rl.report.comparison import Comparison
from rl.report.statistics import BETTER, UNCLEAR, WORSE

BASELINE_COLOUR = "#8c8c8c"
VERDICTS = {BETTER: "#2a9d5c", WORSE: "#d1495b", UNCLEAR: "#7d8ba1", "baseline": BASELINE_COLOUR}
PALETTE = (
    *("#3b7dd8", "#e07b39", "#2a9d8f", "#b5539c", "#c8a02b", "#6a5acd", "#d1495b", "#4c9f38"),
    *("#1b9fc4", "#a0714f", "#d96fa8", "#7a8f2e"),
)
TIMES = ("#3b7dd8", "#c8a02b", "#b5539c", "#2a9d8f", "#e07b39", "#6a5acd", "#7d8ba1")
ROW = 26  # pixels of an arm
NAME, NARROW_NAME = 260, 100  # the most that its name may take
NARROW = 220  # pixels beside a name in a narrow window

# Only where there is one: Vega would follow a null.
LINK = alt.when("isValid(datum.link)").then(alt.Href("link:N"))

Chart = Any  # altair's classes for layers, rows and facets have no common one that types well


class Datasets:
    """The rows of one drawing, by name: given to Altair they would be checked one by one."""

    def __init__(self, place: Path) -> None:
        """`place` is the folder of the page, from where its links go."""
        self.place = place
        self.rows: dict[str, Rows] = {}

    def __call__(self, rows: Rows) -> alt.NamedData:
        """What stands for these rows in a chart; the same in both widths are kept once."""
        for name, known in self.rows.items():
            if known == rows:
                return alt.NamedData(name=name)
        name = f"rows-{len(self.rows)}"
        self.rows[name] = rows
        return alt.NamedData(name=name)


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


def arm_axis(*, narrow: bool) -> alt.Axis:
    """The names of arms beside their rows."""
    return alt.Axis(labelFontSize=11 if narrow else 13, ticks=False, domain=False, labelPadding=8,
                    labelLimit=NARROW_NAME if narrow else NAME)  # fmt: skip


def forest(comparison: Comparison, data: Datasets, *, narrow: bool = False) -> Chart:
    """An arm a row: seeds, interval, difference to the baseline, and the verdict."""
    rows = forest_rows(comparison)
    order = [row["arm"] for row in rows]
    base = alt.Chart(data(rows))
    y = alt.Y("arm:N", sort=order, title=None, axis=arm_axis(narrow=narrow))
    hidden = alt.Y("arm:N", sort=order, axis=None)
    verdict = alt.Color("verdict:N", legend=None, scale=alt.Scale(
        domain=list(VERDICTS), range=list(VERDICTS.values())))  # fmt: skip
    height = ROW * len(order)
    axis = alt.Axis(tickCount=5, title=None)
    score = alt.X("score:Q", scale=alt.Scale(zero=False), axis=axis)
    means = base.mark_tick(thickness=3, height=15).encode(x=score, y=y, color=verdict)
    dots = alt.Chart(data(seed_rows(comparison, data.place)))
    seeds = dots.mark_circle(size=34, opacity=0.75).encode(
        x="score:Q", y=y, color=alt.value("#7d8ba1"), href=LINK,
        tooltip=["arm:N", "seed:N", "score:Q", "run:N", "view:N"],
    )  # fmt: skip
    layers = [*_intervals(rows, y, verdict, data), seeds, means]
    left = alt.layer(*layers).properties(
        width=NARROW if narrow else 300, height=height, title=_score_title(comparison)
    )
    panels = [left]
    if comparison.others and narrow:
        # The other numbers are in the table below the chart.
        word = _text(base, hidden, "verdict", "verdict", 76, "left", height, verdict)
        differences = _differences(base, y, verdict, rows, comparison, data, width=NARROW - 86)
        return alt.vconcat(left, alt.hconcat(differences, word, spacing=10), spacing=16)
    if comparison.others:
        panels += [_differences(base, hidden, verdict, rows, comparison, data, width=230)]
        texts = [
            ("difference_text", "difference", 62, "right"),
            ("interval_text", "95 % interval", 112, "left"),
            ("chance_text", "P(better)", 62, "right"),
            ("verdict", "verdict", 82, "left"),
        ]
        known = [one for one in texts if any(row[one[0]] for row in rows)]
        panels += [_text(base, hidden, *one, height, verdict) for one in known]
    if not narrow:
        panels.append(_text(base, hidden, "minutes_text", "minutes", 52, "right", height, verdict))
    return alt.hconcat(*panels, spacing=10).resolve_scale(y="shared")


def _intervals(rows: Rows, y: alt.Y, verdict: alt.Color, data: Datasets) -> list[Chart]:
    """The baseline's band and the arms' bars, where there are any: of none Vega complains."""
    known = [row for row in rows if row["low"] is not None]
    own = [row for row in known if row["verdict"] == "baseline"]
    x = alt.X("low:Q")
    band = alt.Chart(data(own)).mark_rect(color=BASELINE_COLOUR, opacity=0.16)
    bars = alt.Chart(data(known)).mark_bar(height=5, cornerRadius=2, opacity=0.45)
    return [
        *([band.encode(x=x, x2="high:Q")] if own else []),
        *([bars.encode(x=x, x2="high:Q", y=y, color=verdict)] if known else []),
    ]


def _differences(
    base: alt.Chart, y: alt.Y, verdict: alt.Color, rows: Rows, comparison: Comparison,
    data: Datasets, *, width: int,
) -> Chart:  # fmt: skip
    zero = alt.Chart(data([{"at": 0}])).mark_rule(strokeDash=[3, 3]).encode(x="at:Q")
    # No number of digits: as many as tell the ticks apart.
    x = alt.X(
        "difference:Q",
        axis=alt.Axis(tickCount=width // 46, title=None, format="+~f", labelSeparation=6),
    )
    points = base.mark_point(filled=True, size=46, opacity=1).encode(
        x=x, y=y, color=verdict, stroke=alt.value("white"), strokeWidth=alt.value(1)
    )
    layers = [zero, points]
    if known := [row for row in rows if row["difference_low"] is not None]:
        bars = alt.Chart(data(known)).mark_bar(height=7, cornerRadius=3).encode(
            x="difference_low:Q", x2="difference_high:Q", y=y, color=verdict,
            tooltip=["arm:N", "difference:Q", "interval_text:N", "verdict:N"],
        )  # fmt: skip
        layers.insert(1, bars)
    return alt.layer(*layers).properties(
        width=width,
        height=ROW * len(comparison.results),
        title=f"difference to {comparison.baseline.arm.name}",
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


def times(comparison: Comparison, data: Datasets, *, narrow: bool = False) -> Chart:
    """Seconds of a step by activity, and tokens per second."""
    rows, speeds = time_rows(comparison)
    names = names_of(comparison)
    y = alt.Y("arm:N", sort=names, title=None, axis=arm_axis(narrow=narrow))
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["activity"]] = totals.get(row["activity"], 0) + row["seconds"]
    activities = sorted(totals, key=lambda name: -totals[name])
    scale = alt.Scale(domain=activities, range=list(TIMES))
    place = {name: index for index, name in enumerate(activities)}
    rows = [{**row, "place": place[row["activity"]]} for row in rows]
    legend = alt.Legend(orient="top", columns=4 if narrow else len(activities))
    bars = alt.Chart(data(rows)).mark_bar(height=14).encode(
        x=alt.X("seconds:Q", title="seconds per step", axis=alt.Axis(tickCount=3 if narrow else 6)),
        y=y, order="place:Q", tooltip=["arm:N", "activity:N", "seconds:Q"],
        color=alt.Color("activity:N", scale=scale, title=None, legend=legend),
    )  # fmt: skip
    text = alt.Chart(data(speeds)).mark_text(align="left", dx=6, fontSize=11).encode(
        x="total:Q", y=y, text="speed:N"
    )  # fmt: skip
    # The speeds stand beyond the longest bar.
    width = NARROW - 80 if narrow else 760
    return alt.layer(bars, text).properties(width=width, height=ROW * len(names))


def questions(comparison: Comparison, data: Datasets, *, narrow: bool = False) -> Chart:
    """A column a question, a row an arm; where arms differ most comes first."""
    rows = question_rows(comparison, data.place)
    has_first = any(row["arm"] == AT_FIRST for row in rows)
    names = [AT_FIRST] * has_first + [result.arm.name for result in comparison.by_score]
    most = max(row["place"] for row in rows)
    width = NARROW if narrow else max(320, min(900, 14 * most))
    return (
        alt.Chart(data(rows))
        .mark_rect()
        .encode(
            x=alt.X("place:O", axis=None),
            y=alt.Y("arm:N", sort=names, title=None, axis=arm_axis(narrow=narrow)),
            color=alt.Color("score:Q", title="score", scale=alt.Scale(scheme="viridis"),
                            legend=alt.Legend(orient="top", gradientLength=160,
                                              gradientThickness=8, titleOrient="left")),
            href=LINK,
            tooltip=["question:N", "arm:N", "score:Q", "example:N", "view:N"],
        )
        .properties(width=width, height=22 * len(names))
    )  # fmt: skip


def names_of(comparison: Comparison) -> list[str]:
    """Arms in the order of the forest plot, those without a score last."""
    names = [result.arm.name for result in comparison.by_score]
    return names + [arm.name for arm in comparison.arms if arm.name not in names]
