"""The page of a comparison: one HTML file that needs nothing from outside, and its figures.

Texts and tables come from page_facts.py, charts from charts.py, the frame from page.html. Colours
are variables of the page's style, so that it is light, dark or on paper without drawing again.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from envs.cache import cache_folder
from rl.report import charts, curve_charts, page_facts
from rl.report.chart_data import MOST_QUESTIONS, Rows, health_rows
from rl.report.comparison import Comparison
from rl.report.evidence import LAST_STEPS
from rl.report.judging import TRAINING
from rl.report.sentence import sentence
from rl.report.summary import as_csv
from rl.run.whole_files import write_whole

ON_PAGE = ("var(--ink)", "var(--quiet)", "var(--line)")
ON_PAPER = ("#1c2330", "#5b6472", "#e3e6ea")
SCALE = 2  # pixels of a PNG per unit


def write_page(comparison: Comparison, path: Path, *, command: str = "") -> Path:
    """Write the page, and report.csv and figures/ beside it; where the page lies.

    Args:
        comparison: what is shown.
        path: of the page.
        command: that made the runs, where it is known.

    """
    drawn = drawings(comparison, path.parent)
    text = render(comparison, drawn, command)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors="replace")  # a rollout may hold half of a surrogate pair
    path.with_suffix(".csv").write_text(as_csv(comparison), errors="replace")
    _write_figures(drawn, path.parent / "figures")
    return path


@dataclass(frozen=True)
class Drawing:
    """A chart as Vega-Lite, for a wide and a narrow window, and the rows of both."""

    wide: dict[str, Any]
    narrow: dict[str, Any]
    rows: dict[str, Rows]


def drawings(comparison: Comparison, place: Path) -> dict[str, Drawing]:
    """The charts that there is something to draw in, for a page in `place`."""
    made: dict[str, Callable[..., Any]] = {
        "forest": charts.forest,
        "curves": curve_charts.curves,
        "health": curve_charts.health,
        "times": charts.times,
        "questions": charts.questions,
    }
    drawn = {}
    for name, make in made.items():
        if _has_data(name, comparison):
            data = charts.Datasets(place)
            wide, narrow = (
                make(comparison, data, narrow=narrow).to_dict(validate=False)
                for narrow in (False, True)
            )
            drawn[name] = Drawing(wide, narrow, data.rows)
    return drawn


def _has_data(name: str, comparison: Comparison) -> bool:
    if name == "questions":
        return bool(comparison.questions)
    if name == "times":
        return any(run.activities for run in comparison.runs)
    if name == "health":
        return bool(health_rows(comparison))
    return True


def render(comparison: Comparison, drawn: dict[str, Drawing], command: str) -> str:
    """The page as text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("rl.report").joinpath("page.html").read_text())
    specs = {
        name: {
            **{"wide": drawing.wide, "narrow": drawing.narrow},
            "both": {"datasets": drawing.rows, "config": charts.theme(*ON_PAGE)},
        }
        for name, drawing in drawn.items()
    }
    return template.render(
        comparison=comparison,
        title=comparison.question or sentence(comparison),
        sentence=sentence(comparison),
        charts=set(drawn),
        # "</script>" in a question must not end the script it stands in.
        specs=json.dumps(specs, separators=(",", ":")).replace("<", "\\u003c"),
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
    """Vega, Vega-Lite and their embedding, for a script element; bundling takes seconds, once."""
    import vl_convert

    path = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    if path.is_file():
        return path.read_text()
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    script = script.replace("</script", "<\\/script")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, script)
    return script


def _write_figures(drawn: dict[str, Drawing], folder: Path) -> None:
    """Each chart as PNG and SVG on white, for a paper or a message."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    config = charts.theme(*ON_PAPER) | {"background": "white"}
    for name, drawing in drawn.items():
        printed = drawing.wide | {"datasets": drawing.rows, "config": config}
        svg = vl_convert.vegalite_to_svg(printed)
        (folder / f"{name}.svg").write_text(svg)
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=SCALE))
