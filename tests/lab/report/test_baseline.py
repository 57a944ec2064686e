"""The present code compared with stored runs."""

import json
from functools import partial

import pytest

from benchmarks import baseline
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import made_arm, write_evaluation


@pytest.fixture
def main(tmp_path):
    """Store five seeds; return the command that compares with them."""
    made_arm(tmp_path / "before", "code=a")
    command = partial(baseline.main, file=tmp_path / "stored" / "default.json")
    assert command([str(tmp_path / "before"), "store"]) == 0
    return command


def result(folder):
    record = json.loads((folder / "baseline.json").read_text())
    return record["judged"], next(arm for arm in record["arms"] if arm["run"] == "today")


def test_the_same_runs_cannot_be_told_from_the_stored_ones(main, tmp_path):
    assert main([str(tmp_path / "before")]) == 0
    _, today = result(tmp_path / "before")
    assert (today["decision"], today["scored_seeds"]) == ("open", 5)
    assert today["difference"]["value"] == pytest.approx(0, abs=1e-4)
    assert "Does today" in (tmp_path / "before" / "baseline.html").read_text()


@pytest.mark.parametrize(("last", "difference"), [(20, -0.2), (10, -0.1)])
def test_code_that_learns_less_is_worse_at_the_last_version_that_both_have(
    last, difference, main, tmp_path, capsys
):
    for folder in made_arm(tmp_path / "now", "code=b", gain=-0.2, max_steps=last):
        if last == 10:
            RunFolder(folder).evaluation_of(20).rename(folder / "gone")
    assert main([str(tmp_path / "now")]) == 1
    judged, today = result(tmp_path / "now")
    assert (judged, today["decision"]) == (f"version {last}", "worse")
    assert today["difference"]["value"] == pytest.approx(difference, abs=0.03)
    assert "today (by 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("other questions", "the stored baseline has other questions"),
        ("no version", "no policy version was evaluated in both"),
        ("no runs", "needs a finished run with evaluation=default"),
        ("no file", "make baseline STORE=store"),
    ],
)
def test_an_impossible_comparison_is_refused(broken, problem, main, tmp_path, capsys):
    for folder in made_arm(tmp_path / "now", "code=b") if broken != "no runs" else []:
        for version in (0, 10, 20):
            if broken == "other questions":
                write_evaluation(RunFolder(folder), version, [0.5] * 16, words="add")
            if broken == "no version":
                evaluation = RunFolder(folder).evaluation_of(version)
                evaluation.rename(RunFolder(folder).evaluation_of(version + 5))
    if broken == "no file":
        (tmp_path / "stored" / "default.json").unlink()
    assert main([str(tmp_path / "now")]) == 2
    assert problem in capsys.readouterr().out


def test_the_shipped_baseline_can_be_read():
    runs = baseline.read_stored(baseline.STORED_AT)
    assert [max(run.evaluations) for run in runs] == [150] * 5
    assert [len(run.questions) for run in runs] == [64] * 5


def test_a_run_of_today_that_failed_and_unscored_rollouts_that_were_stored_are_counted(
    main, tmp_path, capsys
):
    *_, last = made_arm(tmp_path / "now", "code=a")
    lines = RunFolder(last).metrics.read_text().splitlines(keepends=True)
    RunFolder(last).metrics.write_text("".join(lines[:12]))
    RunFolder(last).evaluation_of(20).unlink()
    assert main([str(tmp_path / "now")]) == 0
    assert "Ended early: 1 of 10 runs, of today." in capsys.readouterr().out
    evaluation = RunFolder(made_arm(tmp_path / "now", "code=a")[0]).evaluation_of(20)
    text = evaluation.read_text().replace('"reward": 0.', '"reward": null, "was": 0.', 1)
    evaluation.write_text(text)
    assert main([str(tmp_path / "now"), "store"]) == 0
    assert main([str(tmp_path / "before")]) == 0
    assert "left out: stored 1 of 160" in capsys.readouterr().out.replace("\n", " ")
