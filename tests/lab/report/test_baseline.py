"""The present code compared with stored runs."""

import json

import pytest

from lab.report.baseline import main
from rl.runtime.folder import RunFolder
from tests.support.finished_runs import made_arm, write_evaluation


@pytest.fixture
def stored(tmp_path):
    """Store five seeds; return the file."""
    made_arm(tmp_path / "before", "code=a")
    file = tmp_path / "stored" / "default.json"
    assert main([str(tmp_path / "before"), "store", f"file={file}"]) == 0
    return file


def result(folder):
    (today,) = (
        arm
        for arm in json.loads((folder / "baseline.json").read_text())["arms"]
        if arm["run"] == "today"
    )
    return today


def test_equal_code_cannot_be_told_from_the_stored_curves(stored, tmp_path):
    made_arm(tmp_path / "now", "code=c")
    assert main([str(tmp_path / "now"), f"file={stored}"]) == 0
    today = result(tmp_path / "now")
    assert (today["decision"], today["scored_seeds"]) == ("cannot tell", 5)
    assert "Does today" in (tmp_path / "now" / "baseline.html").read_text()


def test_code_that_learns_less_is_worse_and_has_exit_status_1(stored, tmp_path, capsys):
    made_arm(tmp_path / "now", "code=b", gain=-0.2)
    assert main([str(tmp_path / "now"), f"file={stored}"]) == 1
    assert "today (by 0." in capsys.readouterr().out
    assert result(tmp_path / "now")["decision"] == "worse"


def test_stored_scores_are_those_of_the_runs(stored, tmp_path):
    # The same runs were stored, so they differ only by rounding.
    assert main([str(tmp_path / "before"), f"file={stored}"]) == 0
    assert result(tmp_path / "before")["difference"] == pytest.approx(0, abs=1e-4)


def test_shorter_runs_are_compared_at_the_last_version_that_both_have(stored, tmp_path):
    for folder in made_arm(tmp_path / "now", "code=b", gain=-0.2):
        RunFolder(folder).evaluation_of(20).rename(folder / "gone")
    assert main([str(tmp_path / "now"), f"file={stored}"]) == 1
    record = json.loads((tmp_path / "now" / "baseline.json").read_text())
    assert record["judged"] == "version 10"
    assert result(tmp_path / "now")["difference"] == pytest.approx(-0.1, abs=0.03)


@pytest.mark.parametrize(
    "broken", ["other questions", "no version", "no runs", "no file", "other file"]
)
def test_an_impossible_comparison_is_refused_with_the_reason(broken, stored, tmp_path, capsys):
    folders = made_arm(tmp_path / "now", "code=b") if broken != "no runs" else []
    for folder in folders:
        if broken == "other questions":
            for version in (0, 10, 20):
                write_evaluation(RunFolder(folder), version, [0.5] * 16, words="add")
        if broken == "no version":
            for version in (10, 20):
                RunFolder(folder).evaluation_of(version).unlink()
    if broken == "no file":
        stored.unlink()
    if broken == "other file":
        stored.write_text("{}")
    assert main([str(tmp_path / "now"), f"file={stored}"]) == 2
    expected = {
        "other file": "holds no stored curves",
        "other questions": "other questions than the stored baseline: store the curves",
        "no version": "evaluated at no common version",
        "no runs": "there is no run",
        "no file": "make baseline STORE=store",
    }[broken]
    assert expected in " ".join(capsys.readouterr().out.split())
