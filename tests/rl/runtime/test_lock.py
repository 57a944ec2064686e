"""A run's folder belongs to one process at a time, and is free once that process has ended."""

import os
import signal
import subprocess
import sys

import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.lock import FolderInUse, FolderUnusable, ensure_free, locked
from tests.support.launching import ROOT

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from rl.runtime.folder import RunFolder
from rl.runtime.lock import locked
with locked(RunFolder(Path(sys.argv[1]))):
    child = subprocess.Popen(["sleep", "30"])
    print(child.pid, flush=True)
    time.sleep(30)
"""


def test_a_folder_in_use_names_its_holder_and_is_free_once_that_is_killed(tmp_path):
    run_folder = RunFolder(tmp_path / "live")
    run_folder.path.mkdir()
    run_folder.lock.write_text("99999999\n")  # the process of an earlier start
    command = [sys.executable, "-c", HOLDER, str(run_folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        child = int(holder.stdout.readline())
        before = {path: path.read_bytes() for path in run_folder.path.iterdir()}
        for enter in (lambda: ensure_free(run_folder), locked(run_folder).__enter__):
            with pytest.raises(FolderInUse, match=rf"live is used by process {holder.pid}: "):
                enter()
        assert {path: path.read_bytes() for path in run_folder.path.iterdir()} == before
        holder.kill()
        holder.wait()
        ensure_free(run_folder)  # although its child survives
        with locked(run_folder):
            pass
        os.kill(child, signal.SIGKILL)


def test_ensure_free_creates_no_folder_and_a_lock_ends_with_its_block(tmp_path):
    run_folder = RunFolder(tmp_path / "new")
    ensure_free(run_folder)
    assert not run_folder.path.exists()
    with locked(run_folder), pytest.raises(FolderInUse):
        ensure_free(run_folder)
    ensure_free(run_folder)


def test_folders_of_a_run_that_never_started_are_deleted(tmp_path):
    for before in ([], ["outputs/other"], ["outputs/run"]):
        for folder in before:
            (tmp_path / folder).mkdir(parents=True)
        run_folder = RunFolder(tmp_path / "outputs" / "run")
        with pytest.raises(LookupError), locked(run_folder, delete_on=LookupError):
            raise LookupError
        assert run_folder.path.exists() == ("outputs/run" in before)
        assert (tmp_path / "outputs").exists() == bool(before)
    with pytest.raises(KeyError), locked(RunFolder(tmp_path / "failed"), delete_on=ValueError):
        raise KeyError  # the folder of a failed run is kept
    assert (tmp_path / "failed").exists()


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    run_folder = RunFolder(tmp_path / "file" / "outputs" / "run")
    ensure_free(run_folder)
    with pytest.raises(FolderUnusable, match=r"run cannot be written \(Not a directory\)"):
        locked(run_folder).__enter__()
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    command = [sys.executable, "-c", limit + HOLDER, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    remedy = "free disk space, or choose another output_dir\n"
    assert done.stderr.endswith(f"{tmp_path}/run cannot be written (File too large): {remedy}")
    assert not (tmp_path / "run").exists()
