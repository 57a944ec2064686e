"""Checkpoints are complete or absent, and the newest few stay (policy_worker.py does the work)."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.trainer.checkpoint import publish, save_checkpoint
from tests.support.ranks import measurements

torch.set_num_threads(1)


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def found(request):
    return measurements(request.param)["checkpoints"]


def test_a_fresh_folder_has_none(found):
    assert found["none"]


def test_the_newest_stay_in_the_order_of_steps(found):
    assert found["returned"] == ["step_000001", "step_000002", "step_000010"]
    assert found["kept"] == ["step_000002", "step_000010"]


def test_one_that_fails_half_way_does_not_count(found):
    assert "step 11 could not be written (no space left on device)" in found["failed"]
    assert "resume=true" in found["failed"]
    assert found["left behind"] == []
    assert found["complete after failure"] == ["step_000002", "step_000010"]


def test_the_next_attempt_replaces_what_failed_and_leaves_nothing_beside(found):
    assert found["kept at last"] == ["step_000010", "step_000011"]


def test_the_newest_is_resumed_with_the_state_of_the_rollouts(found):
    assert found["resumed"] == [11, "step_000011", {"next": "again"}]
    assert {"deepspeed", "hf", "state.json"} <= set(found["files"])


def test_all_of_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The names that were written to the disk, by whichever they had at that moment."""
    aside, final = tmp_path / ".aside", tmp_path / "step_000001"
    (aside / "hf").mkdir(parents=True)
    for name in ("state.json", "hf/model.safetensors"):
        (aside / name).write_text("x")
    events = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_rename(path, target):
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    publish(aside, final)

    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    written = ("", "/hf", "/state.json", "/hf/model.safetensors")
    assert {*before} == {f"{aside}{name}" for name in written}
    assert after == [str(tmp_path)]
    assert (final / "hf" / "model.safetensors").exists()


@pytest.fixture
def one_rank(tmp_path):
    path = tmp_path / "rendezvous"
    torch.distributed.init_process_group("gloo", f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_disk_that_is_found_full_at_the_sync_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save(step):
        return save_checkpoint(learner, folder, step=step, rollouts={}, model=tmp_path, keep=2)

    folder = RunFolder(tmp_path)
    policy = SimpleNamespace(ranks=SimpleNamespace(first=True), export=lambda path, source: None)
    learner = SimpleNamespace(policy=policy, save=lambda path: (path / "optimizer").write_text("x"))
    save(3)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFailed, match=r"step 4 could not be written \(.*No space left.*resume"):
        save(4)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_000003"]


@pytest.mark.usefixtures("one_rank")
def test_one_whose_state_cannot_be_written_is_absent(tmp_path):
    """The state lies in it before it gets its name: whoever sees the name may read it."""
    folder = RunFolder(tmp_path)
    policy = SimpleNamespace(ranks=SimpleNamespace(first=True), export=lambda path, source: None)
    learner = SimpleNamespace(policy=policy, save=lambda path: None)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(
            learner, folder, step=3, rollouts={"next": object()}, model=tmp_path, keep=2
        )
    assert folder.complete_checkpoints() == []
    assert not folder.checkpoint(3).exists()
