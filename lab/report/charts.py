"""Charts of a report in Vega-Lite: decisions, times, questions.

The page and the figures choose the colours of text and lines (`theme`). Each chart has a `narrow`
version for a phone's width, which stacks what otherwise stands side by side.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import altair as alt

from lab.report.chart_rows import (
    AT_FIRST,
    Rows,
    forest_rows,
    question_rows,
    seed_rows,
    time_rows,
)
from lab.report.comparison import Comparison
from lab.report.statistics import BETTER, UNCLEAR, WORSE

BASELINE_COLOUR = "#8c8c8c"
DECISIONS = {BETTER: "#2a9d5c", WORSE: "#d1495b", UNCLEAR: "#7d8ba1", "baseline": BASELINE_COLOUR}
PALETTE = (
    *("#3b7dd8", "#e07b39", "#2a9d8f", "#b5539c", "#c8a02b", "#6a5acd", "#d1495b", "#4c9f38"),
    *("#1b9fc4", "#a0714f", "#d96fa8", "#7a8f2e"),
)
TIMES = ("#3b7dd8", "#c8a02b", "#b5539c", "#2a9d8f", "#e07b39", "#6a5acd", "#7d8ba1")
ROW = 26  # pixels of an arm
NAME, NARROW_NAME = 260, 100  # pixels of its name at most
NARROW = 220  # pixels beside a name in a narrow window

# A condition, because Vega would also follow a link that is null.
LINK = alt.when("isValid(datum.link)").then(alt.Href("link:N"))

Chart = Any  # altair's classes for layers, rows and facets have no common base class


@dataclass(frozen=True)
class Canvas:
    """What every chart needs: the comparison, the page's folder for its links, and the width."""

    comparison: Comparison
    folder: Path
    narrow: bool = False
    datasets: dict[str, Rows] = field(default_factory=dict)  # by name

    def data(self, rows: Rows) -> alt.NamedData:
        """Add rows to the datasets and return a reference. Altair would check inline rows."""
        for name, known in self.datasets.items():
            if known == rows:  # both widths share them
                return alt.NamedData(name=name)
        name = f"rows-{len(self.datasets)}"
        self.datasets[name] = rows
        return alt.NamedData(name=name)

    @property
    def names(self) -> list[str]:
        """The names of the arms in the order of the forest plot, those without a score last."""
        names = [result.arm.name for result in self.comparison.by_score]
        return names + [arm.name for arm in self.comparison.arms if arm.name not in names]

    @property
    def colours(self) -> alt.Scale:
        """The colours of the arms, which all charts share; the baseline is grey."""
        names = [arm.name for arm in self.comparison.arms]
        baseline = self.comparison.baseline.arm.name
        others = [name for name in names if name != baseline]
        by_name = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}
        by_name[baseline] = BASELINE_COLOUR
        return alt.Scale(domain=names, range=[by_name[name] for name in names])

    def arm_axis(self, names: list[str]) -> alt.Y:
        """Return the vertical axis with the names of arms."""
        axis = alt.Axis(ticks=False, domain=False, labelPadding=8,
                        labelFontSize=11 if self.narrow else 13,
                        labelLimit=NARROW_NAME if self.narrow else NAME)  # fmt: skip
        return alt.Y("arm:N", sort=names, title=None, axis=axis)


def theme(ink: str, quiet: str, line: str) -> dict[str, Any]:
    """Return the configuration of all charts: colours of text, of quiet text, and of lines."""
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


def forest(canvas: Canvas) -> Chart:
    """Return a row per arm: seeds, interval, difference to the baseline, and decision."""
    comparison, rows = canvas.comparison, forest_rows(canvas.comparison)
    order = [row["arm"] for row in rows]
    base = alt.Chart(canvas.data(rows))
    y, hidden = canvas.arm_axis(order), alt.Y("arm:N", sort=order, axis=None)
    colour = alt.Color("decision:N", legend=None, scale=alt.Scale(
        domain=list(DECISIONS), range=list(DECISIONS.values())))  # fmt: skip
    height = ROW * len(order)
    score = alt.X("score:Q", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5, title=None))
    means = base.mark_tick(thickness=3, height=15).encode(x=score, y=y, color=colour)
    dots = alt.Chart(canvas.data(seed_rows(comparison, canvas.folder)))
    seeds = dots.mark_circle(size=34, opacity=0.75).encode(
        x="score:Q", y=y, color=alt.value("#7d8ba1"), href=LINK,
        tooltip=["arm:N", "seed:N", "score:Q", "run:N", "view:N"],
    )  # fmt: skip
    left = alt.layer(*_intervals(canvas, rows, y, colour), seeds, means).properties(
        width=NARROW if canvas.narrow else 300, height=height, title=_score_title(comparison)
    )

    def text(name: str, title: str, width: int, align: Any) -> Chart:
        bold = 600 if name == "decision" else 400
        drawn = base.mark_text(align=align, fontSize=12, fontWeight=bold).encode(
            x=alt.value(width if align == "right" else 0), y=hidden, text=f"{name}:N"
        )
        if name == "decision":
            drawn = drawn.encode(color=colour)
        anchor = alt.TitleParams(title, anchor="end" if align == "right" else "start",
                                 fontWeight="normal", fontSize=11)  # fmt: skip
        return drawn.properties(width=width, height=height, title=anchor)

    if comparison.others and canvas.narrow:
        # The table below the chart has the other numbers.
        differences = _differences(canvas, base, y, colour, rows, NARROW - 86)
        word = text("decision", "decision", 76, "left")
        return alt.vconcat(left, alt.hconcat(differences, word, spacing=10), spacing=16)
    panels = [left]
    if comparison.others:
        panels.append(_differences(canvas, base, hidden, colour, rows, 230))
        texts = [
            ("difference_text", "difference", 62, "right"),
            ("interval_text", "95 % interval", 112, "left"),
            ("chance_text", "P(better)", 62, "right"),
            ("decision", "decision", 82, "left"),
        ]
        panels += [text(*one) for one in texts if any(row[one[0]] for row in rows)]
    if not canvas.narrow:
        panels.append(text("minutes_text", "minutes", 52, "right"))
    return alt.hconcat(*panels, spacing=10).resolve_scale(y="shared")


def _intervals(canvas: Canvas, rows: Rows, y: alt.Y, colour: alt.Color) -> list[Chart]:
    """Return the baseline's band and the arms' bars. Vega warns about a layer without rows."""
    known = [row for row in rows if row["low"] is not None]
    own = [row for row in known if row["decision"] == "baseline"]
    x = alt.X("low:Q")
    band = alt.Chart(canvas.data(own)).mark_rect(color=BASELINE_COLOUR, opacity=0.16)
    bars = alt.Chart(canvas.data(known)).mark_bar(height=5, cornerRadius=2, opacity=0.45)
    return [
        *([band.encode(x=x, x2="high:Q")] if own else []),
        *([bars.encode(x=x, x2="high:Q", y=y, color=colour)] if known else []),
    ]


def _differences(
    canvas: Canvas, base: alt.Chart, y: alt.Y, colour: alt.Color, rows: Rows, width: int
) -> Chart:
    zero = alt.Chart(canvas.data([{"at": 0}])).mark_rule(strokeDash=[3, 3]).encode(x="at:Q")
    # The format has no number of digits, so that no two ticks have the same label.
    x = alt.X(
        "difference:Q",
        axis=alt.Axis(tickCount=width // 46, title=None, format="+~f", labelSeparation=6),
    )
    points = base.mark_point(filled=True, size=46, opacity=1).encode(
        x=x, y=y, color=colour, stroke=alt.value("white"), strokeWidth=alt.value(1)
    )
    layers = [zero, points]
    if known := [row for row in rows if row["difference_low"] is not None]:
        bars = alt.Chart(canvas.data(known)).mark_bar(height=7, cornerRadius=3).encode(
            x="difference_low:Q", x2="difference_high:Q", y=y, color=colour,
            tooltip=["arm:N", "difference:Q", "interval_text:N", "decision:N"],
        )  # fmt: skip
        layers.insert(1, bars)
    title = f"difference to {canvas.comparison.baseline.arm.name}"
    return alt.layer(*layers).properties(width=width, height=ROW * len(rows), title=title)


def _score_title(comparison: Comparison) -> str:
    number = len(comparison.questions)
    of = f"score on {number} held-out questions" if number else "training reward"
    return f"{of}, {comparison.judged}"


def times(canvas: Canvas) -> Chart:
    """Return the seconds of a step by activity, and the tokens per second."""
    rows, speeds = time_rows(canvas.comparison)
    y = canvas.arm_axis(canvas.names)
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["activity"]] = totals.get(row["activity"], 0) + row["seconds"]
    activities = sorted(totals, key=lambda name: -totals[name])
    scale = alt.Scale(domain=activities, range=list(TIMES))
    rows = [{**row, "place": activities.index(row["activity"])} for row in rows]
    legend = alt.Legend(orient="top", columns=4 if canvas.narrow else len(activities))
    axis = alt.Axis(tickCount=3 if canvas.narrow else 6)
    bars = alt.Chart(canvas.data(rows)).mark_bar(height=14).encode(
        x=alt.X("seconds:Q", title="seconds per step", axis=axis),
        y=y, order="place:Q", tooltip=["arm:N", "activity:N", "seconds:Q"],
        color=alt.Color("activity:N", scale=scale, title=None, legend=legend),
    )  # fmt: skip
    text = alt.Chart(canvas.data(speeds)).mark_text(align="left", dx=6, fontSize=11).encode(
        x="total:Q", y=y, text="speed:N"
    )  # fmt: skip
    # The speeds need space beyond the longest bar.
    width = NARROW - 80 if canvas.narrow else 760
    return alt.layer(bars, text).properties(width=width, height=ROW * len(canvas.names))


def questions(canvas: Canvas) -> Chart:
    """Return a heat map: a column per question, a row per arm, the largest differences first."""
    rows = question_rows(canvas.comparison, canvas.folder)
    has_first = any(row["arm"] == AT_FIRST for row in rows)
    names = [AT_FIRST] * has_first + [one.arm.name for one in canvas.comparison.by_score]
    most = max(row["place"] for row in rows)
    width = NARROW if canvas.narrow else max(320, min(900, 14 * most))
    legend = alt.Legend(orient="top", gradientLength=160, gradientThickness=8, titleOrient="left")
    chart = alt.Chart(canvas.data(rows)).mark_rect().encode(
        x=alt.X("place:O", axis=None),
        y=canvas.arm_axis(names),
        color=alt.Color("score:Q", title="score", scale=alt.Scale(scheme="viridis"),
                        legend=legend),
        href=LINK,
        tooltip=["question:N", "arm:N", "score:Q", "example:N", "view:N"],
    )  # fmt: skip
    return chart.properties(width=width, height=22 * len(names))
