"""The callback inside a real Hydra sweep."""

import json
from pathlib import Path

import pytest

from lab.cli.sweep import SweepStart
from tests.support.sweep_app import SweepApp


@pytest.fixture
def app(tmp_path):
    """Run a sweep of three seeds; return its status, its output, and the arms of its report."""

    def run(*arguments):
        status, output = SweepApp(tmp_path).run("--multirun", "seed=range(3)", *arguments)
        (written,) = tmp_path.glob("outputs/sweeps/*/report.json")
        return status, output, json.loads(written.read_text())["arms"]

    return run


def test_a_sweep_ends_with_its_report_on_the_screen_and_on_disk(app, tmp_path):
    status, output, groups = app("rate=0.5,0.7")
    assert status == 0, output
    assert [group["run"] for group in groups] == ["rate=0.7", "rate=0.5"]
    assert [group["reward"] for group in groups] == pytest.approx([1.7, 1.5])
    assert [group["seeds"] for group in groups] == [3, 3]
    assert all(Path(folder).is_dir() for group in groups for folder in group["folders"])
    assert "rate=0.7" in output
    assert "unfinished" not in output  # because the column would be empty
    assert "rate=0.7 cannot be distinguished from rate=0.5" in output.replace("\n", " ")
    assert "by the training reward of the last 10 steps, 3 seeds each" in output
    (page,) = tmp_path.glob("outputs/sweeps/*/report.html")
    assert json.loads(page.with_suffix(".json").read_text())["conclusion"] in output


def test_a_sweep_with_a_failed_job_runs_the_others_and_reports(app):
    status, output, groups = app("crash=error")
    assert status != 0
    (group,) = groups
    assert (group["seeds"], group["failed"], group["reward"]) == (3, 1, pytest.approx(1.5))
    assert group["errors"] == ["vLLM is gone"]
    assert "vLLM is gone" in output
    assert "unfinished" in output


def test_a_sweep_that_dies_in_the_middle_reports_its_finished_jobs(app):
    status, _, groups = app("crash=exit")
    assert status == 3
    (group,) = groups
    assert (group["seeds"], group["failed"], group["reward"]) == (3, 2, pytest.approx(0.5))
    assert group["errors"] == ["ended with status 3", "not started"]


def test_a_refused_sweep_has_no_report(capsys):
    SweepStart().on_multirun_end(None)  # Hydra 1.4 calls every callback at the end
    assert capsys.readouterr().out == ""
