"""Write the HTML page of a comparison, and its charts as PNG and SVG files.

The page loads no external files. Texts and axes of charts take their colours from CSS variables, so
that they suit light mode, dark mode and print. The PNG and SVG files have fixed colours.
"""

import time
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from envs.loading import cache_folder
from lab.report.arms import differing_keys
from lab.report.comparison import Comparison
from lab.report.conclusion import basis, describe_power, ended_early, headline
from lab.report.curves import curves
from lab.report.forest import forest
from lab.report.notes import group_by_cause
from lab.report.numbers import arm_records, table
from lab.report.run import LAST_STEPS
from lab.report.scoring import TRAINING
from lab.report.statistics import NUM_DRAWS
from rl.runtime.files import write_atomically
from rl.runtime.text import printable

PAGE_COLOURS = ("var(--ink)", "var(--quiet)", "var(--line)")
FIGURE_COLOURS = ("#1c2330", "#5b6472", "#e3e6ea")
PNG_SCALE = 2  # PNG pixels per SVG pixel


def write_page(comparison: Comparison, path: Path, *, command: str = "") -> None:
    """Write the page and figures/. `command`: the command that resumes the sweep."""
    specs = {"forest": forest(comparison).to_dict(validate=False), "curves": curves(comparison)}
    # Replace lone surrogates, which settings may contain and UTF-8 cannot encode.
    path.write_text(render(comparison, specs, command), errors="replace")
    _write_figures(specs, path.parent / "figures")


def render(comparison: Comparison, specs: dict[str, dict[str, Any]], command: str) -> str:
    """Return the HTML of the page. `specs` are the Vega-Lite charts by name."""
    themed = {name: {**spec, "config": theme(*PAGE_COLOURS)} for name, spec in specs.items()}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("lab.report").joinpath("page.html").read_text())
    return template.render(
        comparison=comparison,
        effect=f"{comparison.smallest_effect:g}" if comparison.smallest_effect else "",
        headline=headline(comparison),
        ended_early=ended_early(comparison),
        basis=basis(comparison),
        describe_power=describe_power(comparison),
        heads=[*comparison.arms[0].choices] or ["arm"],
        numbers=table(arm_records(comparison, comparison.arms)),
        settings=settings_table(comparison),
        failures=group_by_cause(comparison.left_out),
        envs=sorted({question.env for question in comparison.scoring.questions}),
        steps=sorted({run.max_steps for one in comparison.results for run in one.runs}),
        draws=NUM_DRAWS,
        # Use msgspec, because it writes NaN as null. Escape "<", so that "</script>" stays text.
        specs=msgspec.json.encode(themed).decode().replace("<", "\\u003c"),
        script=vega_script(),
        command=command,
        made=time.strftime("%Y-%m-%d %H:%M"),
        num_scored=len(comparison.scoring.runs),
        running_mean=LAST_STEPS if comparison.scoring.measure == TRAINING else 0,
    )


def theme(text: str, label: str, line: str) -> dict[str, Any]:
    """Return Vega's options for these colours of texts, labels and lines."""
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif",
        "axis": dict.fromkeys(("labelColor", "titleColor"), label)
        | dict.fromkeys(("gridColor", "domainColor", "tickColor"), line)
        | {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
        "title": {"color": text, "fontSize": 12, "fontWeight": 600, "anchor": "start", "offset": 8},
        "header": {"labelColor": text, "titleColor": label, "labelFontSize": 12},
        "legend": {"labelColor": text, "titleColor": label, "symbolStrokeWidth": 3},
        "text": {"color": text, "fill": text, "fontSize": 12},
        "view": {"stroke": None},
        "rule": {"color": label},
    }


def settings_table(comparison: Comparison) -> list[list[str]]:
    base = comparison.baseline.arm
    arms = [base, *(arm for arm in comparison.arms if arm is not base)]
    rows = [["setting", *(arm.name for arm in arms)]]
    for key in differing_keys([arm.runs[0] for arm in arms]):
        values = [printable(str(arm.runs[0].config.get(key, "-"))) for arm in arms]
        rows.append([printable(key.removesuffix("._target_")), *values])
    return rows


def vega_script() -> str:
    """Return the JavaScript of Vega. The script is cached, because bundling takes seconds."""
    import vl_convert

    path = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    if path.is_file():
        return path.read_text()
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    script = script.replace("</script", "<\\/script")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, script)
    return script


def _write_figures(specs: dict[str, dict[str, Any]], folder: Path) -> None:
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    config = theme(*FIGURE_COLOURS) | {"background": "white"}
    for name, spec in specs.items():
        svg = vl_convert.vegalite_to_svg(msgspec.json.encode(spec | {"config": config}).decode())
        (folder / f"{name}.svg").write_text(svg)
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
