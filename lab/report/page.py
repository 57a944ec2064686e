"""The page of a comparison: one HTML file that loads nothing from outside, and its figures.

Charts come from forest.py and curves.py, numbers from numbers.py, the layout from page.html.
Colours are CSS variables, so one drawing serves light mode, dark mode and paper.
"""

import json
import time
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from envs.loading import cache_folder
from lab.report.arms import differing_keys
from lab.report.comparison import Comparison, by_cause
from lab.report.conclusion import conclusion
from lab.report.curves import curves
from lab.report.evaluations import shortened
from lab.report.forest import forest
from lab.report.numbers import arm_records, as_csv, table
from lab.report.run import LAST_STEPS, Run
from lab.report.scoring import TRAINING
from lab.report.statistics import LEVEL, NUM_DRAWS
from rl.runtime.files import write_whole
from rl.runtime.folder import RunFolder

ON_PAGE = ("var(--ink)", "var(--quiet)", "var(--line)")
ON_PAPER = ("#1c2330", "#5b6472", "#e3e6ea")
SCALE = 2  # pixels of a PNG per unit
_MOST_KEYS = 60  # rows of settings
_LONGEST_VALUE = 60  # characters of a setting


def write_page(comparison: Comparison, path: Path, *, command: str = "") -> None:
    """Write the page, and report.csv and figures/ beside it.

    Args:
        comparison: the content.
        path: of the page.
        command: that started the runs, "" if it is unknown.

    """
    drawn = {"forest": forest(comparison), "curves": curves(comparison)}
    specs = {name: chart.to_dict(validate=False) for name, chart in drawn.items()}
    # A rollout may contain a lone surrogate.
    path.write_text(render(comparison, specs, command), errors="replace")
    path.with_suffix(".csv").write_text(as_csv(comparison), errors="replace")
    _write_figures(specs, path.parent / "figures")


def render(comparison: Comparison, specs: dict[str, dict[str, Any]], command: str) -> str:
    """Return the page as text."""
    themed = {name: {**spec, "config": theme(*ON_PAGE)} for name, spec in specs.items()}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("lab.report").joinpath("page.html").read_text())
    return template.render(
        comparison=comparison,
        conclusion=conclusion(comparison),
        numbers=table(arm_records(comparison, comparison.arms)),
        settings=settings(comparison),
        failures=by_cause(comparison.left_out),
        caveats=caveats(comparison),
        # A name that contains "</script>" must not end the script element.
        specs=json.dumps(themed, separators=(",", ":")).replace("<", "\\u003c"),
        script=vega_script(),
        command=command,
        made=time.strftime("%Y-%m-%d %H:%M"),
        num_judged=sum(len(result.runs) for result in comparison.results),
        running_mean=LAST_STEPS if comparison.scoring.measure == TRAINING else 0,
    )


def theme(ink: str, quiet: str, line: str) -> dict[str, Any]:
    """Return the configuration of all charts: colours of text, of quiet text, and of lines."""
    return {
        "background": "transparent",
        "font": "system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif",
        "axis": {
            **{"labelColor": quiet, "titleColor": quiet, "gridColor": line, "domainColor": line},
            **{"tickColor": line, "titleFontWeight": "normal", "labelFontSize": 11},
            "titleFontSize": 11,
        },
        "title": {"color": ink, "fontSize": 12, "fontWeight": 600, "anchor": "start", "offset": 8},
        "header": {"labelColor": ink, "titleColor": quiet, "labelFontSize": 12},
        "legend": {"labelColor": ink, "titleColor": quiet, "symbolStrokeWidth": 3},
        "text": {"color": ink, "fill": ink, "fontSize": 12},
        "view": {"stroke": None},
        "rule": {"color": quiet},
    }


def settings(comparison: Comparison) -> list[list[str]]:
    """Return the settings in which arms differ: a row of heads, then a row per setting."""
    base = comparison.baseline.arm
    arms = [base, *(arm for arm in comparison.arms if arm is not base)]
    runs = [arm.runs[0] for arm in arms]
    rows = [
        [key.removesuffix("._target_"), *(_setting(key, run) for run in runs)]
        for key in differing_keys(runs)[:_MOST_KEYS]
    ]
    return [["setting", *(arm.name for arm in arms)], *rows]


def _setting(key: str, run: Run) -> str:
    """Return a value as text; of the path of a callable only its name."""
    text = str((run.config or {}).get(key, "-"))
    return shortened(text.rpartition(".")[2] if key.endswith("_target_") else text, _LONGEST_VALUE)


def caveats(comparison: Comparison) -> list[str]:
    """Return what these numbers do not show."""
    texts = []
    envs = sorted({question.env for question in comparison.scoring.questions})
    if len(envs) == 1:
        texts.append(f"One environment ({envs[0]}): elsewhere the arms may come in another order.")
    starts = {_fingerprint(run) for run in comparison.runs} - {""}
    if len(starts) == 1:
        texts.append("All runs start from the same model: another may give other differences.")
    elif starts:
        texts.append(f"The runs start from {len(starts)} different models, which differences show.")
    steps = {run.max_steps for result in comparison.results for run in result.runs}
    if len(steps) == 1:
        texts.append(f"Scores are those after {steps.pop()} steps: longer runs may cross.")
    else:
        texts.append(f"The runs are not equally long ({min(steps)} to {max(steps)} steps).")
    if len(comparison.others) > 1 and comparison.has_intervals:
        texts.append(
            f"{len(comparison.others)} arms were compared with one: p-values are adjusted for that "
            "(Holm), the intervals of the differences are not."
        )
    if comparison.has_intervals:
        texts.append(
            f"Intervals: {LEVEL:.0%}, {NUM_DRAWS:,} draws of seeds within arms and of questions "
            "for all arms (docs/report.md)."
        )
    return texts


def _fingerprint(run: Run) -> str:
    """Return the fingerprint of the initial model, "" if it is unknown."""
    with suppress(OSError, IndexError):
        return RunFolder(run.folder).model_fingerprint() if run.folder else ""
    return ""


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


def _write_figures(specs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write each chart as PNG and SVG on white, for a paper or a message."""
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    config = theme(*ON_PAPER) | {"background": "white"}
    for name, spec in specs.items():
        svg = vl_convert.vegalite_to_svg(spec | {"config": config})
        (folder / f"{name}.svg").write_text(svg)
        (folder / f"{name}.png").write_bytes(vl_convert.svg_to_png(svg, scale=SCALE))
