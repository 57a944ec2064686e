"""The page of a comparison: one HTML file that loads nothing from outside, and its figures.

Tables come from page_facts.py, charts from charts.py and curve_charts.py, the layout from
page.html. Colours are CSS variables, so one drawing serves light mode, dark mode and paper.
"""

import json
import time
from dataclasses import replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from envs.loading import cache_folder
from lab.report import charts, curve_charts, page_facts
from lab.report.chart_rows import MOST_QUESTIONS, health_rows
from lab.report.comparison import Comparison
from lab.report.conclusion import conclusion
from lab.report.run import LAST_STEPS
from lab.report.scoring import TRAINING
from lab.report.summary import as_csv
from rl.runtime.files import write_whole

ON_PAGE = ("var(--ink)", "var(--quiet)", "var(--line)")
ON_PAPER = ("#1c2330", "#5b6472", "#e3e6ea")
SCALE = 2  # pixels of a PNG per unit


def write_page(comparison: Comparison, path: Path, *, command: str = "") -> None:
    """Write the page, and report.csv and figures/ beside it.

    Args:
        comparison: the content.
        path: of the page.
        command: that started the runs, "" if it is unknown.

    """
    drawn = drawings(comparison, path.parent)
    text = render(comparison, drawn, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors="replace")  # a rollout may contain a lone surrogate
    path.with_suffix(".csv").write_text(as_csv(comparison), errors="replace")
    _write_figures(drawn, path.parent / "figures")


def drawings(comparison: Comparison, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the charts that have data, for a page in `folder`.

    Each is in Vega-Lite, for a wide and a narrow window, with the data of both.
    """
    made = {"forest": charts.forest, "curves": curve_charts.curves}
    if health_rows(comparison):
        made["health"] = curve_charts.health
    if any(run.activities for run in comparison.runs):
        made["times"] = charts.times
    if comparison.questions:
        made["questions"] = charts.questions
    drawn = {}
    for name, make in made.items():
        canvas = charts.Canvas(comparison, folder)
        drawn[name] = {
            "wide": make(canvas).to_dict(validate=False),
            "narrow": make(replace(canvas, narrow=True)).to_dict(validate=False),
            "both": {"datasets": canvas.datasets, "config": charts.theme(*ON_PAGE)},
        }
    return drawn


def render(comparison: Comparison, drawn: dict[str, dict[str, Any]], command: str) -> str:
    """Return the page as text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("lab.report").joinpath("page.html").read_text())
    return template.render(
        comparison=comparison,
        title=comparison.question or conclusion(comparison),
        conclusion=conclusion(comparison),
        charts=set(drawn),
        # A question that contains "</script>" must not end the script element.
        specs=json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c"),
        script=vega_script(),
        facts=page_facts,
        command=command,
        made=time.strftime("%Y-%m-%d %H:%M"),
        num_runs=len(comparison.runs),
        num_judged=sum(len(result.runs) for result in comparison.results),
        most_questions=MOST_QUESTIONS,
        running_mean=LAST_STEPS if comparison.measure == TRAINING else 0,
    )


def vega_script() -> str:
    """Return the JavaScript of Vega, from the cache because bundling it takes seconds."""
    import vl_convert

    path = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    if path.is_file():
        return path.read_text()
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    script = script.replace("</script", "<\\/script")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, script)
    return script


def _write_figures(drawn: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write each chart as PNG and SVG on white, for a paper or a message."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    config = charts.theme(*ON_PAPER) | {"background": "white"}
    for name, drawing in drawn.items():
        printed = drawing["wide"] | drawing["both"] | {"config": config}
        svg = vl_convert.vegalite_to_svg(printed)
        (folder / f"{name}.svg").write_text(svg)
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=SCALE))
