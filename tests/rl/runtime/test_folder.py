"""The files of a run: sockets, checkpoints, what a new start deletes, and one process at a time."""

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from rl.runtime.folder import RunFolder, UnusableFile, drop_steps_from, naming_damage
from rl.runtime.lock import FolderInUse, FolderUnusable, ensure_free, locked
from tests.support.launching import ROOT


@pytest.mark.parametrize("run", ["run", "x" * 90, "link/run"], ids=["short", "deep", "linked"])
def test_sockets_can_be_bound_at_any_depth_and_are_deleted_with_temporary_files(tmp_path, run):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(deep)
    before = {*Path(tempfile.gettempdir()).glob("offbyone-*")}
    run_folder, copy = RunFolder(tmp_path / run), RunFolder(tmp_path / f"{run}-copy")
    private, keys = run_folder.private, set()
    for _ in range(2):  # a resumed run finds the sockets of the last, and makes another key
        private.make()
        # vLLM names its own sockets by a UUID.
        for path in (private.rollouts_socket, private.temporary / str(uuid.uuid4())):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        assert (run_folder.path / "sockets" / "rollouts.sock").is_socket()
        assert private.read_key() is None
        private.make_key()
        assert stat.S_IMODE(private.key.stat().st_mode) == 0o600
        keys.add(private.read_key())
    assert len(keys) == 2
    assert min(map(len, keys)) > 30
    temporary, sockets = Path(private.environment()["TMPDIR"]), private.path.resolve()
    for folder in (sockets, temporary):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # A copy of the folder leaves the sockets and the key of the original.
    copy.path.mkdir()
    (copy.path / "sockets").symlink_to(sockets)
    copy.private.make()
    copy.clear_process_files()
    assert private.read_key()

    run_folder.clear_process_files()

    assert not temporary.exists()
    assert not sockets.exists()
    assert {*Path(tempfile.gettempdir()).glob("offbyone-*")} == before


def test_compiled_code_is_read_only_from_a_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/user")
    private, compiled = RunFolder(tmp_path).private, tmp_path / "cache" / "compiled"
    compiled.mkdir(mode=0o755, parents=True)
    assert private.environment()["TORCHINDUCTOR_CACHE_DIR"] == "/of/the/user"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert private.environment()["TORCHINDUCTOR_CACHE_DIR"] == str(compiled)
    assert stat.S_IMODE(compiled.stat().st_mode) == 0o700
    compiled.rmdir()
    compiled.symlink_to(tmp_path)
    found = private.environment()["TORCHINDUCTOR_CACHE_DIR"]
    assert found == str(private.temporary / "compiled")


def test_a_run_resumes_from_its_newest_complete_checkpoint(tmp_path):
    run_folder = RunFolder(tmp_path)
    assert run_folder.resume_point() is None
    for step in (100, 20, 1_000_000, 999_950):
        folder = run_folder.checkpoint(step)
        folder.mkdir(parents=True)
        state = {"step": step, "rollouts": {"n": step}}
        run_folder.state_of(folder).write_text(json.dumps(state))
    for name in (".step_3000000.incomplete", "step_3000000_best"):  # the second is a user's copy
        (run_folder.checkpoints / name).mkdir()
    names = [path.name for path in run_folder.complete_checkpoints()]
    assert names == ["step_000020", "step_000100", "step_999950", "step_1000000"]
    resumed = run_folder.resume_point()
    assert (resumed.step, resumed.rollouts) == (1_000_000, {"n": 1_000_000})
    assert resumed.folder == run_folder.checkpoint(1_000_000)
    assert run_folder.exports() == []  # no checkpoint has a subfolder hf


def test_clean_up_follows_no_links_and_deletes_files_and_incomplete_checkpoints(tmp_path):
    run_folder, precious = RunFolder(tmp_path / "run"), tmp_path / "precious" / "file"
    for folder in (run_folder.path, precious.parent):
        folder.mkdir()
    precious.touch()
    for name in ("status", "failures", "endpoints", "sockets"):
        (run_folder.path / name).symlink_to(precious.parent)
    run_folder.clear_process_files()
    assert precious.exists()
    assert list(run_folder.path.iterdir()) == []
    run_folder.private.path.symlink_to(tmp_path / "nowhere")
    run_folder.statuses.write_text("a file")
    for path in (run_folder.warnings, run_folder.stop_request):
        path.touch()
    for name in (".step_000004.incomplete", "step_000002", ".step_000001.deleted"):
        (run_folder.checkpoints / name).mkdir(parents=True)
        (run_folder.checkpoints / name / "optimizer").write_text("large")
    run_folder.clear_process_files()
    assert list(run_folder.path.iterdir()) == [run_folder.checkpoints]
    assert [path.name for path in run_folder.checkpoints.iterdir()] == ["step_000002"]
    for path in (run_folder.built_model, run_folder.warm_start):  # preparations of a failed start
        path.mkdir()
    run_folder.clear_model_files(keep=str(run_folder.built_model))
    assert run_folder.built_model.is_dir()
    assert not run_folder.warm_start.exists()
    run_folder.clear_model_files(keep=None)
    assert not run_folder.built_model.exists()


def test_later_steps_are_dropped_and_their_rollouts_kept_elsewhere(tmp_path):
    drop_steps_from(RunFolder(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []
    folder = RunFolder(tmp_path)
    folder.tokens.mkdir()
    for step in (3, 4, 12):
        folder.rollouts_of(step).write_text(f"{step}\n")
        for process in ("rollouts", "trainer.rank0", "trainer.rank1"):
            folder.tokens_of(step, process).touch()
        folder.evaluation_of(step).touch()
    (folder.rollouts / "step_of_mine.jsonl").touch()
    (folder.tokens / ".step_000012.rollouts.parquet.incomplete").touch()
    (folder.evaluations / ".version_000012.jsonl.123").touch()
    drop_steps_from(folder, 4)
    folder.rollouts_of(12).write_text("again\n")
    drop_steps_from(folder, 4)  # a step may be lost twice

    def names(path):
        return {path.name for path in path.iterdir()}

    assert names(folder.rollouts) == {"step_000003.jsonl", "step_of_mine.jsonl"}
    assert names(folder.evaluations) == {"version_000003.jsonl", "version_000004.jsonl"}
    assert {name[:11] for name in names(folder.tokens)} == {"step_000003"}
    assert names(folder.dropped_rollouts) == {"step_000004.jsonl", "step_000012.jsonl"}
    assert (folder.dropped_rollouts / "step_000012.jsonl").read_text() == "12\nagain\n"


def test_only_an_error_of_its_content_makes_a_file_damaged(tmp_path):
    of_content = (KeyError("step"), OSError("no magic bytes"), OSError(errno.ENOENT, "missing"))
    others = (OSError(errno.EIO, "of the disk"), ImportError("pyarrow"), MemoryError())
    for error in (*of_content, *others, RuntimeError("CUDA out of memory")):
        expected = UnusableFile if error in of_content else type(error)
        with pytest.raises(expected) as caught, naming_damage(tmp_path / "x", "delete it"):
            raise error
        said = str(caught.value)
        assert said.startswith(f"{tmp_path}/x is damaged (") == (error in of_content)
        assert said.endswith("): delete it") == (error in of_content)


def test_some_files_are_results_and_some_make_a_folder_a_run(tmp_path):
    for number, (name, content, has_results, is_run) in enumerate(
        (
            ("metrics.jsonl", "{}\n", True, True),
            ("metrics.jsonl", "", False, True),
            ("summary.json", "{}", True, False),
            ("rollouts.jsonl", "{}\n", True, True),
            ("checkpoints/step_000010/hf/x", "", True, False),
            ("checkpoints/.step_000010/hf/x", "", False, False),
            ("rollouts/step_000000.jsonl", "{}\n", False, True),
            ("evaluations/version_000000.jsonl", "{}\n", False, True),
            ("config.yaml", "a: 1\n", False, True),
            ("logs/trainer.rank0.log", "an error\n", False, False),
        )
    ):
        run_folder = RunFolder(tmp_path / str(number))
        assert (run_folder.has_results(), run_folder.is_run) == (False, False)
        (run_folder.path / name).parent.mkdir(parents=True)
        (run_folder.path / name).write_text(content)
        assert (run_folder.has_results(), run_folder.is_run) == (has_results, is_run), name


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


def test_folders_of_a_run_that_never_started_are_deleted(tmp_path):
    for before in ([], ["outputs/other"], ["outputs/run"]):
        for folder in before:
            (tmp_path / folder).mkdir(parents=True)
        run_folder = RunFolder(tmp_path / "outputs" / "run")
        ensure_free(run_folder)
        assert run_folder.path.exists() == ("outputs/run" in before)
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
