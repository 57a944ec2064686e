"""A run's folder belongs to one process at a time, and to nobody once that one is gone."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl.run.folder import RunFolder
from rl.run.lock import FolderInUse, FolderUnusable, ensure_free, locked

REPO = Path(__file__).parents[3]
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from rl.run.folder import RunFolder
from rl.run.lock import locked
with locked(RunFolder(Path(sys.argv[1]))):
    child = subprocess.Popen(["sleep", "30"])
    print(child.pid, flush=True)
    time.sleep(30)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that runs in the folder, and its child."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "live")]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        yield process
        process.kill()
        subprocess.run(["kill", str(child)], check=False, capture_output=True)


def test_a_folder_in_use_names_its_holder_and_is_left_alone(holder, tmp_path):
    run_folder = RunFolder(tmp_path / "live")
    before = {path: path.read_bytes() for path in run_folder.path.iterdir()}
    for enter in (lambda: ensure_free(run_folder), locked(run_folder).__enter__):
        with pytest.raises(FolderInUse, match=rf"live is running \(pid {holder.pid}\): "):
            enter()
    assert {path: path.read_bytes() for path in run_folder.path.iterdir()} == before


def test_a_holder_that_was_killed_holds_nothing_though_its_child_lives(holder, tmp_path):
    run_folder = RunFolder(tmp_path / "live")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    ensure_free(run_folder)
    with locked(run_folder):
        pass


def test_asking_makes_no_folder_and_a_lock_is_free_after_its_block(tmp_path):
    run_folder = RunFolder(tmp_path / "new")
    ensure_free(run_folder)
    assert not run_folder.path.exists()
    for _ in range(2):
        with locked(run_folder), pytest.raises(FolderInUse):
            ensure_free(run_folder)
    ensure_free(run_folder)


def test_of_many_that_start_at_once_one_goes_on(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "live")]
    starts = [
        subprocess.Popen(
            command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    children = [start.stdout.readline() for start in starts]
    errors = [
        start.stderr.read() for start, child in zip(starts, children, strict=True) if not child
    ]
    for start, child in zip(starts, children, strict=True):
        start.kill()
        start.wait()
        if child:
            subprocess.run(["kill", child.strip()], check=False, capture_output=True)
    assert sorted(map(bool, children)) == [False, False, True]
    assert all("is running (pid" in error for error in errors)


def test_what_was_made_for_a_run_that_never_started_goes_again(tmp_path):
    for before in ([], ["outputs/other"], ["outputs/run"]):
        for folder in before:
            (tmp_path / folder).mkdir(parents=True)
        run_folder = RunFolder(tmp_path / "outputs" / "run")
        with pytest.raises(LookupError), locked(run_folder, undone_by=LookupError):
            raise LookupError
        assert run_folder.path.exists() == ("outputs/run" in before)
        assert (tmp_path / "outputs").exists() == bool(before)
    with pytest.raises(KeyError), locked(RunFolder(tmp_path / "failed"), undone_by=ValueError):
        raise KeyError  # what failed is kept, to be looked into
    assert (tmp_path / "failed").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    run_folder = RunFolder(tmp_path / "file" / "outputs" / "run")
    ensure_free(run_folder)
    with pytest.raises(FolderUnusable, match=r"run cannot be written \(Not a directory\)"):
        locked(run_folder).__enter__()


def test_where_no_byte_can_be_written_the_folder_is_named_and_what_to_do(tmp_path):
    code = """
import resource, sys
from pathlib import Path
from rl.run.folder import RunFolder
from rl.run.lock import FolderUnusable, locked
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    with locked(RunFolder(Path(sys.argv[1]))):
        print("it is ours")
except FolderUnusable as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (
        f"{tmp_path}/run cannot be written (File too large): make room, or choose another "
        "output_dir\n",
        "",
    )
