"""The page: its content, how a browser draws it, and its command line."""

import csv
import json
import re
import shutil
from importlib.resources import files

import numpy as np
import pytest

from lab.report.arms import Arm
from lab.report.command import main
from lab.report.comparison import compare
from lab.report.curves import curve_rows
from tests.support import compared_runs as made
from tests.support.finished_runs import made_arm, made_run, made_sweep

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
HOSTILE = "x\x07</script><script>alert(1)</script>"
CLEANED = HOSTILE.replace("\x07", "")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    for loss, gain in (("grpo", 0.0), ("cispo", 0.2)):
        made_arm(root / "runs", f"loss={loss}", gain=gain, seeds=3, loss=loss)
    for seed in range(3):
        scores = {20: [0.5 + seed / 50] * 16}
        made_run(root / "runs" / f"odd{seed}", f"loss={HOSTILE}", seed=seed, evaluations=scores)
    made_run(root / "runs" / "half", "loss=cispo", steps=4, max_steps=20, loss="cispo")
    folder = made_sweep(root / "sweep", sorted((root / "runs").iterdir()), f"Which? {HOSTILE}")
    assert main([str(folder), "baseline=grpo"]) == 0
    return folder


def test_the_page_loads_nothing_and_all_files_have_escaped_names(sweep):
    text = (sweep / "report.html").read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"(src|href)=.?http", outside)
    assert CLEANED not in text
    assert "\x07" not in text  # a control character could crash the program that draws the charts
    assert "default-src 'none'" in text
    assert '<td class="other">cispo</td>' in text
    lines = list(csv.DictReader((sweep / "report.csv").open()))
    assert {line["arm"] for line in lines} == {"loss=grpo", "loss=cispo", f"loss={CLEANED}"}
    names = {path.name for path in (sweep / "figures").iterdir()}
    assert names == {"forest.png", "forest.svg", "curves.png", "curves.svg"}
    assert (sweep / "figures" / "forest.png").read_bytes().startswith(b"\x89PNG")
    assert "+0." in (sweep / "figures" / "forest.svg").read_text()


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_text_has_enough_contrast_in_light_and_dark_mode_and_on_paper():
    modes = re.findall(r":root \{(.*?)\}", files("lab.report").joinpath("page.html").read_text())
    assert len(modes) == 3
    colours = {}  # each mode changes colours of the first one
    for mode in modes:
        colours |= dict(re.findall(r"--(\w+): (#\w+);", mode))
        for text in ("ink", "quiet", "red", "green", "link"):
            for paper in ("paper", "soft"):
                dark, light = sorted(luminance(colours[name]) for name in (text, paper))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (mode, text, paper)


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        ([], 2, ""),
        (["nowhere"], 2, "nowhere is not a folder"),
        (["nowhere", "out=x.html"], 1, ""),
        (["x=y"], 2, "x=y: the key x does not exist; choose from baseline, judged, out"),
        ([".", "judged=0"], 2, "judged=0: give the number"),
        ([".", "out=page.pdf"], 2, "ends in .html"),
        (["baseline=grpo"], 2, "give the folder"),
        ([".", "out=sweep.html"], 2, "would overwrite sweep.json: choose another name"),
        ([".", "out=a/summary.html"], 2, "would overwrite summary.json"),
        ([".", "out=versions.html"], 2, "would overwrite versions.json"),
        ([".", "until.smallest_effect=0.0"], 2, "effect=0.0: give a difference above 0, such as"),
        ([".", "until.smallest_effect=-1"], 2, "until.smallest_effect=-1: give a difference"),
    ],
)
def test_bad_arguments_are_refused_with_the_remedy(arguments, status, problem, capsys):
    assert main(arguments) == status
    assert problem in capsys.readouterr().err


def test_the_options_and_else_the_first_sweep_determine_the_comparison(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("lab.report.command.show", lambda *given: shown.append(given) or True)
    folders = []
    for name, effect in (("bare", None), ("first", 0.25), ("second", 0.5)):
        runs = [made_run(tmp_path / f"{name}-{x}", x, evaluations={9: [0.5]}) for x in "ab"]
        # A folder whose name contains "=" is no option.
        folders.append(made_sweep(tmp_path / f"x={name}", runs, "" if name == "bare" else name))
        if effect:
            info = json.loads((folders[-1] / "sweep.json").read_text())
            (folders[-1] / "sweep.json").write_text(json.dumps(info | {"smallest_effect": effect}))
    words = [str(folder) for folder in folders]
    for more, effect in ([], 0.25), (["until.smallest_effect=1e-2", "baseline=b"], 0.01):
        assert main([*words, *more]) == 0
        comparison, page, command = shown.pop()
        assert (comparison.smallest_effect, comparison.question) == (effect, "first")
        assert comparison.baseline.arm.name == ("b" if more else "a")
        assert (page, command) == (folders[0] / "report.html", "python train.py --multirun "
                                   "hydra.sweep.dir=x")  # fmt: skip


def test_a_baseline_that_cannot_be_one_leaves_the_earlier_report_alone(sweep, capsys):
    before = (sweep / "report.json").read_bytes()
    assert main([str(sweep), "baseline=loss=grop"]) == 2
    told = capsys.readouterr()
    assert "baseline=loss=grop is not an arm: choose one of loss=cispo, loss=grpo" in told.err
    assert not told.out
    assert (sweep / "report.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_reported_below_the_conclusion(tmp_path, capsys):
    made_run(tmp_path / "run", "loss=grpo", reward=0.25)
    (tmp_path / "file").write_text("")  # where a folder would have to be
    assert main([str(tmp_path), f"out={tmp_path}/file/report.html"]) == 1
    told = capsys.readouterr().out
    assert told.index("scores 0.250") < told.index("not all files are written")


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: make browser")
def test_the_charts_are_drawn_and_nothing_is_fetched(sweep):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    problems, fetched = [], []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((sweep / "report.html").as_uri())
        for name in ("forest", "curves"):
            page.wait_for_selector(f"#{name} svg .mark-group path", state="attached")
        # The same rows by another measure of how far a run is.
        page.check("input[value=tokens]")
        page.wait_for_function("document.querySelector('#curves').textContent.includes('2k')")
        assert "tokens" in page.text_content("#curves svg")  # the title of the x axis
        for width in (1400, 390):
            page.set_viewport_size({"width": width, "height": 844})
            page.reload()
            page.wait_for_selector("#curves svg")
            ends = "n => Math.max(...n.map(one => one.getBoundingClientRect().right))"
            assert page.eval_on_selector_all(".interval, .decision, #curves svg", ends) <= width
            page.eval_on_selector(".settings", "one => { one.parentElement.scrollLeft = 9999 }")
            left = page.eval_on_selector(".settings td", "one => one.getBoundingClientRect().left")
            assert left >= 0  # the names of the settings stay visible
            lines = "one => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight)"
            assert page.eval_on_selector(".conclusion", lines) <= 3.01
        browser.close()
    assert (problems, len(set(fetched))) == ([], 1)


def test_the_band_of_runs_of_different_lengths_has_as_many_points_as_a_run():
    lengths = (150, 141, 150)
    runs = [made.run(rewards=[0.5] * n, seed=seed) for seed, n in enumerate(lengths)]
    points, bands = curve_rows(compare([Arm("a", "a", tuple(runs)), made.arm("b", rewards=[0.5])]))
    assert len([point for point in points if point["arm"] == "a"]) == 3 * 40
    steps = [band["steps"] for band in bands if band["arm"] == "a"]
    assert (len(steps), steps[0], steps[-1]) == (40, *np.array(runs[1].training.steps)[[0, -1]])
