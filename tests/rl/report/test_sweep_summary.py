"""The callback inside a real Hydra sweep."""

import json
from pathlib import Path

import pytest

from rl.report.sweep_summary import SweepSummary
from tests.support.sweep_app import SweepApp


@pytest.fixture
def app(tmp_path):
    """Runs a sweep; returns its status, output, and the summary it wrote."""
    program = SweepApp(tmp_path)

    def run(*arguments):
        status, output = program.run(*arguments)
        written = list(tmp_path.glob("outputs/sweeps/*/summary.json"))
        groups = json.loads(written[0].read_text()) if written else None
        return status, output, groups

    return run


def test_a_sweep_ends_with_its_table_on_the_screen_and_on_disk(app, tmp_path):
    status, output, groups = app("--multirun", "seed=range(3)", "rate=0.5,0.7")
    assert status == 0, output
    assert [group["run"] for group in groups] == ["rate=0.7", "rate=0.5"]
    assert [group["reward"] for group in groups] == pytest.approx([1.7, 1.5])
    assert [group["seeds"] for group in groups] == [3, 3]
    assert all(Path(folder).is_dir() for group in groups for folder in group["folders"])
    assert "rate=0.7" in output
    assert "unfinished" not in output  # a column of nothing
    assert "rate=0.7 cannot be told from rate=0.5" in output.replace("\n", " ")
    assert "by the training reward of the last 10 steps, 3 seeds each" in output
    (page,) = tmp_path.glob("outputs/sweeps/*/report.html")
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["sentence"] in output
    assert record["arms"] == groups
    assert "rate=0.7" in page.with_name("summary.md").read_text()


def test_a_sweep_with_a_failed_job_runs_the_others_and_still_prints_its_table(app, tmp_path):
    status, output, groups = app("--multirun", "seed=range(3)", "crash=error")
    assert status != 0
    (group,) = groups
    assert (group["seeds"], group["failed"], group["reward"]) == (3, 1, pytest.approx(1.5))
    assert group["errors"] == ["vLLM is gone"]
    assert "vLLM is gone" in output
    assert "unfinished" in output
    assert len(list(tmp_path.glob("outputs/sweeps/*/report.html"))) == 1


def test_a_sweep_that_dies_in_the_middle_still_says_what_it_had(app):
    status, _, groups = app("--multirun", "seed=range(3)", "crash=exit")
    assert status == 3
    (group,) = groups
    assert (group["seeds"], group["failed"], group["reward"]) == (3, 2, pytest.approx(0.5))
    assert group["errors"] == ["ended with status 3", "not started"]


def test_a_single_run_writes_no_sweep(app, tmp_path):
    status, output, groups = app("seed=1")
    assert (status, groups) == (0, None), output
    assert not (tmp_path / "outputs" / "sweeps").exists()


def test_a_sweep_that_was_refused_before_it_began_has_no_table(capsys):
    SweepSummary().on_multirun_end(None)  # Hydra 1.4 tells every callback of the end
    assert capsys.readouterr().out == ""
