"""Where everything of a run lies, sockets of deep folders included."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from rl.run.folder import RunFolder


@pytest.fixture
def link_to_deep(tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(deep)
    return tmp_path / "link"


@pytest.mark.parametrize("run", ["run", "x" * 90, "link/run"], ids=["short", "deep", "linked"])
def test_sockets_can_be_bound_in_a_private_folder_however_deep_the_run_lies(
    tmp_path, link_to_deep, run
):
    run_folder = RunFolder(tmp_path / run)
    for _ in range(2):  # a resumed run finds the sockets of the last
        run_folder.private.make()
        for path in (run_folder.private.vllm_socket, run_folder.private.rollouts_socket):
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
            assert (run_folder.path / "sockets" / path.name).is_socket()
        mode = (run_folder.path / "sockets").stat().st_mode
        assert stat.S_IMODE(mode) == 0o700


def test_a_short_run_folder_holds_its_sockets_itself(tmp_path_factory):
    run_folder = RunFolder(tmp_path_factory.mktemp("s"))
    run_folder.private.make()

    assert run_folder.private.vllm_socket == run_folder.path.resolve() / "sockets" / "vllm.sock"


def test_the_model_is_remembered(tmp_path):
    run_folder = RunFolder(tmp_path)
    run_folder.set_model(tmp_path / "a model", "123")

    assert (run_folder.model(), run_folder.model_fingerprint()) == (tmp_path / "a model", "123")


def test_rollouts_and_logs_have_their_places(tmp_path):
    run_folder = RunFolder(tmp_path)

    assert run_folder.rollouts_of(12) == tmp_path / "rollouts" / "step_000012.jsonl"
    assert (tmp_path / "rollouts").is_dir()
    assert run_folder.logs == tmp_path / "logs"


def test_a_run_resumes_from_its_newest_complete_checkpoint(tmp_path):
    run_folder = RunFolder(tmp_path)
    assert run_folder.resumed() is None
    for step in (100, 20, 3):
        folder = run_folder.checkpoint(step)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step, "rollouts": {"n": step}}))
    run_folder.checkpoint(300).with_name(".step_000300.incomplete").mkdir()

    assert [p.name for p in run_folder.complete_checkpoints()] == [
        "step_000003",
        "step_000020",
        "step_000100",
    ]
    resumed = run_folder.resumed()
    assert (resumed.step, resumed.folder, resumed.rollouts) == (
        100,
        run_folder.checkpoint(100),
        {"n": 100},
    )


def test_checkpoints_are_in_the_order_of_their_steps_beyond_a_million(tmp_path):
    run_folder = RunFolder(tmp_path)
    for step in (1_000_000, 999_950):
        folder = run_folder.checkpoint(step)
        folder.mkdir(parents=True)
        run_folder.state_of(folder).write_text(json.dumps({"step": step, "rollouts": {}}))
    assert run_folder.resumed().step == 1_000_000


@pytest.mark.parametrize("name", ["status", "failures", "sockets"])
def test_clean_up_does_not_follow_links_to_what_is_not_ours(tmp_path, name):
    precious = tmp_path / "precious" / "file"
    precious.parent.mkdir()
    precious.touch()
    run_folder = RunFolder(tmp_path / "run")
    run_folder.path.mkdir()
    (run_folder.path / name).symlink_to(precious.parent)

    run_folder.clear_processes()

    assert precious.exists()
    assert not (run_folder.path / name).is_symlink()


def test_clean_up_of_a_link_that_points_to_a_file_or_nowhere(tmp_path):
    run_folder = RunFolder(tmp_path)
    run_folder.private.path.symlink_to(tmp_path / "nowhere")
    run_folder.statuses.write_text("a file")
    run_folder.clear_processes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("run", ["run", "x" * 90], ids=["short", "deep"])
def test_the_private_folder_of_temporary_files_goes_with_the_sockets(tmp_path, run):
    before = {*Path(tempfile.gettempdir()).glob("offbyone-*")}
    run_folder = RunFolder(tmp_path / run)
    run_folder.private.make()
    scratch = Path(run_folder.private.environment()["TMPDIR"])
    assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as listener:  # as vLLM names its own
        listener.bind(str(scratch / str(uuid.uuid4())))

    run_folder.clear_processes()

    assert not scratch.exists()
    assert {*Path(tempfile.gettempdir()).glob("offbyone-*")} == before


_COMPILES = (
    "import torch; torch.compile(lambda x: (x >= 1).sum(-1), dynamic=True)(torch.ones(3, 4))"
)


def test_nothing_that_pytorch_compiles_is_lost_with_the_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    run_folder = RunFolder(tmp_path)
    run_folder.private.make()
    ours = run_folder.private.environment()
    subprocess.run([sys.executable, "-c", _COMPILES], env={**os.environ, **ours}, check=True)
    assert [*(tmp_path / "compiled").rglob("*.so")]
    assert not [*Path(ours["TMPDIR"]).rglob("*.gch")]
    run_folder.clear_processes()


def test_what_a_failed_start_prepared_goes_but_never_the_model_that_was_asked_for(tmp_path):
    folder = RunFolder(tmp_path)
    for path in (folder.built_model, folder.warm_start):
        path.mkdir()
    folder.clear_preparations(but=str(folder.built_model))
    assert folder.built_model.is_dir()
    assert not folder.warm_start.exists()
    folder.clear_preparations(but=None)
    assert not folder.built_model.exists()


def test_what_a_killed_process_left_of_a_checkpoint_goes_and_a_complete_one_stays(tmp_path):
    folder = RunFolder(tmp_path)
    for name in (".step_000004.incomplete", "step_000002", ".step_000001.deleted"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "optimizer").write_text("large")
    folder.clear_processes()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000002"]
