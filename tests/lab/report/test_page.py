"""The page: its content, that it loads nothing from outside, and its command line."""

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest
import vl_convert

from lab.report.chart_rows import curve_rows, forest_rows, health_rows, question_rows
from lab.report.charts import Canvas, forest
from lab.report.command import main
from rl.runtime.folder import RunFolder
from tests.lab.report.test_comparison import compared
from tests.support.finished_runs import made_arm, made_run, made_sweep

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    for loss, gain in (("grpo", 0.0), ("cispo", 0.2), ("dapo", 0.01)):
        made_arm(root / "runs", f"loss={loss}", gain=gain, seeds=3, loss={"name": loss})
    made_run(root / "runs" / "half", "loss=cispo", steps=4, max_steps=20, loss={"name": "cispo"})
    odd = RunFolder(root / "runs" / "loss-dapo-s0")
    odd.versions.write_text(json.dumps({"torch": "2.12.0", "offbyone": "0.1.0"}))
    path = odd.evaluation_of(20)
    path.write_text(path.read_text().replace("reverse 0", f"reverse {HOSTILE}"))
    runs = sorted((root / "runs").iterdir())
    folder = made_sweep(root / "sweep", runs, f"Which loss? {HOSTILE}")
    assert main([str(folder), "baseline=grpo"]) == 0
    return folder


def test_the_page_has_the_conclusion_and_every_section(sweep):
    text = (sweep / "report.html").read_text()
    record = json.loads((sweep / "report.json").read_text())
    assert record["conclusion"].startswith("cispo (by 0.")
    assert record["conclusion"] in text
    for heading in ("Which is better", "Over the run", "Question by question", "Health",
                    "Where the time went", "What differs", "Failures", "Again"):  # fmt: skip
        assert f"<h2>{heading}" in text
    assert '"title":["score on","held-out questions"]' in text
    assert "stopped after step 4 of 20" in text
    assert "Runs of other versions" in text
    assert "2.12.0: 1 runs (loss-dapo-s0 ...)" in text
    assert "python train.py loss=cispo --multirun seed=0,1,2" in text
    assert "python train.py --multirun" in text
    assert '<td data-head="cispo" class="other">cispo</td>' in text


def test_the_page_loads_nothing_and_escapes_questions(sweep):
    text = (sweep / "report.html").read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"(src|href)=.?http", outside)
    assert HOSTILE not in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text
    specs = re.search(r'id="specs">(.*?)</script>', text, re.S)
    assert set(json.loads(specs[1])) == {"forest", "curves", "health", "times", "questions"}


def test_numbers_and_figures_are_written_beside_it(sweep):
    lines = list(csv.DictReader((sweep / "report.csv").open()))
    assert len(lines) == 10
    assert {line["arm"] for line in lines} == {"loss=grpo", "loss=cispo", "loss=dapo"}
    assert [line["left_out"] for line in lines if line["run"] == "half"] == [
        "stopped after step 4 of 20"
    ]
    names = {path.name for path in (sweep / "figures").iterdir()}
    assert names >= {"forest.png", "forest.svg", "curves.png", "curves.svg"}
    assert (sweep / "figures" / "forest.png").read_bytes().startswith(b"\x89PNG")


def test_the_rows_of_the_charts_contain_the_numbers(sweep):
    comparison = compared(sweep, baseline="grpo")
    forest = {row["arm"]: row for row in forest_rows(comparison)}
    assert list(forest) == [result.arm.name for result in comparison.by_score]
    assert forest["cispo"]["decision"] == "better"
    assert forest["grpo"]["difference"] is None
    points, bands = curve_rows(comparison, sweep)
    assert len([p for p in points if p["arm"] == "cispo"]) == 9
    assert [band["steps"] for band in bands if band["arm"] == "cispo"] == [0, 10, 20]
    assert [band["seconds"] for band in bands if band["arm"] == "cispo"] == [0, 30, 60]
    assert {row["metric"] for row in health_rows(comparison)} == {"entropy", "gradient norm"}
    questions = question_rows(comparison, sweep)
    assert {row["arm"] for row in questions} == {"at first", "grpo", "cispo", "dapo"}
    assert {row["score"] for row in questions if row["arm"] == "at first"} == {0.3}


@pytest.mark.parametrize("scale", [1.0, 0.05, 0.004])
def test_no_two_ticks_of_the_difference_have_one_label(scale, tmp_path):
    for arm, gain in (("a", 0.0), ("b", 0.3), ("c", -0.6)):
        for seed in range(2):
            reward = 0.5 + scale * (gain + seed / 20)
            made_run(tmp_path / f"{arm}{seed}", f"x={arm}", seed=seed, reward=reward)
    canvas = Canvas(compared(tmp_path), tmp_path)
    drawn = vl_convert.vegalite_to_svg(
        forest(canvas).to_dict(validate=False) | {"datasets": canvas.datasets}
    )
    labels = re.findall(r'role-axis-label".*?</g>', drawn)
    ticks = [t for t in re.findall(r">([^<>]+)</text>", " ".join(labels)) if t[0] in "+\u2212"]
    assert len(ticks) == len(set(ticks)) > 3


def test_a_page_of_training_rewards_has_no_questions(tmp_path):
    for seed in range(3):
        made_run(tmp_path / f"a{seed}", "x=a", seed=seed)
    assert main([str(tmp_path), f"out={tmp_path}/there/page.html"]) == 0
    text = (tmp_path / "there" / "page.html").read_text()
    assert "Question by question" not in text
    assert "training reward" in text
    # The text and the axis say that the curve is smoothed.
    assert "the mean training reward of a step and the 9 before it" in text
    assert '"title":["training reward","mean of up to 10 steps"]' in text


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        ([], 2, ""),
        (["nowhere"], 2, "nowhere does not exist"),
        (["nowhere", "out=x.html"], 1, ""),
        (["x=y"], 2, "the keys are baseline, judged, out"),
        ([".", "judged=0"], 2, "judged=0: give the number"),
        ([".", "out=page.pdf"], 2, "ends in .html"),
        (["baseline=grpo"], 2, "name the folder"),
        ([".", "out=sweep.html"], 2, "sweep.json is another file's name"),
    ],
)
def test_bad_arguments_are_refused_with_the_remedy(arguments, status, problem, capsys, tmp_path):
    assert main(arguments) == status
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [("loss=grop", "no arm is called loss=grop: baseline= is one of loss=cispo, loss=grpo"),
     ("loss=grpo", "no run of the baseline loss=grpo has finished")],
)  # fmt: skip
def test_a_baseline_that_cannot_be_one_leaves_the_earlier_report_alone(
    tmp_path, capsys, name, problem
):
    runs = made_arm(tmp_path / "runs", "loss=cispo")
    runs.append(made_run(tmp_path / "runs" / "half", "loss=grpo", steps=4, max_steps=20))
    folder = made_sweep(tmp_path / "sweep", runs)
    assert main([str(folder)]) == 0
    before, _ = (folder / "report.json").read_text(), capsys.readouterr()
    assert main([str(folder), f"baseline={name}"]) == 2
    told = capsys.readouterr()
    assert problem in told.err
    assert not told.out
    assert (folder / "report.json").read_text() == before


def test_an_empty_folder_is_reported_and_nothing_is_written(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "there is no run here" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_command_of_a_cell_quotes_any_example_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in made_arm(tmp_path / "my runs", "loss=grpo"):
        path = RunFolder(run).evaluation_of(20)
        path.write_text(path.read_text().replace('"example": 3,', '"example": "it\'s `id` $HOME",'))
    rows = question_rows(compared(tmp_path / "my runs"), tmp_path)
    command = next(row["view"] for row in rows if row["example"].startswith("it") and row["view"])
    shell = ["bash", "-c", command.replace("python view.py", "printf '%s\\n'")]
    run, where = subprocess.check_output(shell, text=True).splitlines()
    assert Path(run).is_dir()
    condition = where.removeprefix("where=")
    assert "example = 'it''s `id` $HOME'" in condition
    assert "env = 'reverse'" in condition


def test_a_folder_that_cannot_be_written_is_reported_below_the_conclusion(tmp_path, capsys):
    made_run(tmp_path / "run", "loss=grpo", reward=0.25)
    (tmp_path / "file").write_text("")  # where a folder would have to be
    (tmp_path / "report.json").mkdir()
    for arguments in ([f"out={tmp_path}/file/report.html"], []):
        assert main([str(tmp_path), *arguments]) == 1
        told = capsys.readouterr().out
        assert told.index("scores 0.250") < told.index("nothing could be written")
