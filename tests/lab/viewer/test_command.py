"""The command line of view.py: its errors, its export and its server."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lab.viewer.command import _runs_of, main
from tests.support.viewed_run import copy_run

REPO = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return copy_run(tmp_path / "outputs" / "first", steps=2)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    return main(words), " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["empty"], "empty holds no run: offbyone view lists the runs in outputs/"),
        (["first", "export=first"], "Is a directory: 'first': choose another path or port"),
        (["first", "export=page.html", "step=99"], "no rollout is selected"),
        (["first", "port=65536"], "port=65536 is not a port: give a number"),
    ],
)
def test_what_cannot_be_shown_or_exported_is_refused(words, problem, run, capsys, monkeypatch):
    (run.parent / "empty").mkdir()
    monkeypatch.chdir(run.parent)
    status, text = said(capsys, *words)
    assert status == 2
    assert problem in text
    assert not Path("page.html").exists()


def test_a_folder_of_runs_and_a_sweep_show_all_their_runs(run, capsys, tmp_path):
    copy_run(run.parent / "second", steps=1)
    page = tmp_path / "page.html"
    assert main([str(run.parent), f"export={page}"]) == 0
    text = page.read_text()
    sweep = tmp_path / "sweep"
    (sweep / "jobs").mkdir(parents=True)
    done = {"overrides": ["seed=1"], "folder": str(run.parent / "second")}
    (sweep / "jobs" / "00000.json").write_text(json.dumps(done))
    assert main([str(sweep), f"export={page}"]) == 0
    assert len(page.read_text()) < len(text)
    # Runs of equal names are told apart by their paths.
    other = copy_run(tmp_path / "there" / "first", steps=1)
    assert list(_runs_of([run, run])) == ["first"]
    assert list(_runs_of([run, other])) == [str(run), str(other)]


def test_a_refused_export_suggests_filters_that_work(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.viewer.export.MOST_ROLLOUTS", 12)
    words, filters = (str(run), f"export={tmp_path / 'page.html'}"), ("source=training", "step=0")
    problem = "56 rollouts exceed the limit of one file (12): choose some, such as "
    assert said(capsys, *words) == (2, problem + " ".join(filters))
    status, text = said(capsys, *words, *filters)  # exactly 12 rollouts
    assert status == 0
    assert re.fullmatch(r".*/page\.html \(0\.\d MB\)", text)


def test_the_server_requires_the_key_and_ends_on_ctrl_c(run):
    command = [sys.executable, "view.py", str(run)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=REPO, env=environment, **pipes) as viewer:
        try:
            line = next(line for line in viewer.stdout if line.startswith("http"))
            address = line.strip()
            with urllib.request.urlopen(f"{address}table?run=0&start=0&generation=0") as table:
                assert json.load(table)["name"] == "first"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address[:-2]}/")  # a wrong key
        finally:
            viewer.send_signal(signal.SIGINT)
            try:
                _, errors = viewer.communicate(timeout=30)
            finally:
                viewer.kill()
    assert errors == ""
    assert viewer.returncode in (0, 130)
