"""The command line of view.py: its errors, its export and its server."""

import json
import os
import re
import signal
import socket
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
    status = main(words)
    return status, " ".join(capsys.readouterr().out.split())


def test_a_folder_without_a_run_is_refused(run, capsys, tmp_path):
    empty = run.parent / "empty"
    empty.mkdir()
    status, text = said(capsys, str(empty))
    assert (status, text) == (2, f"{empty} holds no run: python view.py lists the runs in outputs/")
    assert "gone does not exist" in said(capsys, str(tmp_path / "gone"))[1]


def test_the_texts_name_the_command_with_which_the_program_was_started(run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent.parent)
    assert "python view.py outputs/first" in said(capsys)[1]
    monkeypatch.setattr(sys, "orig_argv", ["python", "/there/bin/offbyone", "view"])
    text = said(capsys)[1]
    assert "offbyone view outputs/first" in text
    assert "python" not in text


def test_a_folder_of_runs_and_a_sweep_show_all_their_runs(run, capsys, tmp_path):
    copy_run(run.parent / "second", steps=1)
    page = tmp_path / "page.html"
    assert main([str(run.parent), f"export={page}"]) == 0
    text = page.read_text()
    sweep = tmp_path / "sweep"
    (sweep / "jobs").mkdir(parents=True)
    done = {"overrides": ["seed=1"], "folder": str(run.parent / "second")}
    (sweep / "jobs" / "00000.json").write_text(json.dumps(done))
    failed = {"overrides": ["seed=2"], "folder": None, "error": "failed"}
    (sweep / "jobs" / "00001.json").write_text(json.dumps(failed))
    (sweep / "jobs" / "00002.json").write_text("{half")
    assert main([str(sweep), f"export={page}"]) == 0
    assert len(page.read_text()) < len(text)


def test_runs_of_equal_names_are_told_apart_by_their_paths(run, tmp_path):
    other = copy_run(tmp_path / "there" / "first", steps=1)
    assert list(_runs_of([run, run])) == ["first"]
    assert list(_runs_of([run, other])) == [str(run), str(other)]


def test_an_export_that_would_be_empty_or_wrong_is_refused(run, capsys, tmp_path):
    assert "cannot be written: Is a directory" in said(capsys, str(run), f"export={tmp_path}")[1]
    page = tmp_path / "page.html"
    status, text = said(capsys, str(run), f"export={page}", "step=99")
    assert status == 2
    assert "no rollout to export" in text
    for name in ("source", "env"):
        assert "no rollout to export" in said(capsys, str(run), f"export={page}", f"{name}=x")[1]
    assert not page.exists()


@pytest.mark.parametrize("port", ["x", "65536", "-1"])
def test_a_number_that_is_no_port_is_refused_and_a_port_in_use_is_named(port, run, capsys):
    assert f"port={port} is not a port: give a number" in said(capsys, str(run), f"port={port}")[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"port={taken.getsockname()[1]}"
        assert f"{used} is not available (Address already in use" in said(capsys, str(run), used)[1]


def test_a_refused_export_suggests_filters_that_work(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("lab.viewer.export.MOST_ROLLOUTS", 12)
    page = tmp_path / "page.html"
    status, text = said(capsys, str(run), f"export={page}")
    assert status == 2
    filters = ["source=training", "step=0"]
    assert text.endswith(f"of one file (12): choose some, such as {' '.join(filters)}")
    assert text.startswith("56 rollouts exceed the limit")
    status, text = said(capsys, str(run), f"export={page}", *filters)  # exactly 12 rollouts
    assert status == 0
    assert re.fullmatch(r".*/page\.html \(0\.\d MB\)", text)


def test_an_export_contains_no_path_of_the_run(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main([str(run), f"export={page}", "step=1"]) == 0
    assert str(run.parent) not in page.read_text()


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
