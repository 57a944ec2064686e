"""Checkpoints are complete or absent, and the newest few stay."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from safetensors import SafetensorError

from rl.learner.ranks import num_resumed_steps
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.trainer.checkpoint import flush_and_rename, save_checkpoint
from tests.support.ranks import on_ranks, worlds


@worlds
@on_ranks
def test_the_newest_stay_and_one_that_fails_leaves_nothing(setup):
    run_folder, source = RunFolder(setup.new_folder()), setup.sources["float32"]
    policy = setup.policy("float32", "zero1", setup.adamw())

    def save(step, exporting=None, **changes):
        given = {"rollouts": {"next": step}, "model": source, "keep": 2, **changes}
        learner = SimpleNamespace(policy=exporting or policy, save=policy.save)
        return save_checkpoint(learner, run_folder, step=step, **given)

    def names():
        dist.barrier()
        found = sorted(path.name for path in run_folder.checkpoints.iterdir())
        dist.barrier()  # rank 0 must not write the next checkpoint while another rank lists
        return found

    def full(folder, source):
        raise OSError(errno.ENOSPC, "no space left on device")

    assert run_folder.resume_point() is None
    assert [save(step).name for step in (1, 2, 10)] == [f"step_{n:06}" for n in (1, 2, 10)]
    assert names() == ["step_000002", "step_000010"]
    said = r"step 11 could not be written \(.*no space left on device\).*resume=true"
    with pytest.raises(RunFailed, match=said):
        save(11, SimpleNamespace(ranks=policy.ranks, export=full))
    assert names() == ["step_000002", "step_000010"]
    save(11)
    save(11, rollouts={"next": "again"})
    assert names() == ["step_000010", "step_000011"]
    found = run_folder.resume_point()
    assert (found.step, found.rollouts) == (11, {"next": "again"})
    assert {"deepspeed", "hf", "state.json"} <= {path.name for path in found.folder.iterdir()}
    policy.load(run_folder.checkpoint(11))


@worlds
@on_ranks
def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees(setup):
    folder = setup.new_folder()
    seen = RunFolder(folder / f"rank{setup.ranks.rank}")  # what a file system shows to this rank
    for step in (3, 5) if setup.ranks.first else (3,):
        seen.checkpoint(step).mkdir(parents=True)
    assert num_resumed_steps(seen, setup.ranks) == 5


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), "inline_con"),
        (SafetensorError("Error while serializing: I/O error: (os error 28)"), "os error 28"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "exceeded.* 3,072 MiB.* Free more space"),
        (RuntimeError("CUDA error: an illegal memory access"), None),
    ],
)
def test_a_checkpoint_that_cannot_be_written_is_deleted_and_reported(
    error, said, tmp_path, monkeypatch
):
    def fail(checkpoint):
        raise error

    policy = SimpleNamespace(
        ranks=SimpleNamespace(first=True), export=lambda folder, model: folder.mkdir()
    )
    learner = SimpleNamespace(policy=policy, save=lambda path: (path / "optimizer").write_text("x"))

    monkeypatch.setattr(RunFolder, "state_of", staticmethod(fail))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3072 * 2**20))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    given = {"rollouts": {"step": 3}, "model": tmp_path, "keep": 2}
    with pytest.raises(RunFailed if said else RuntimeError, match=said) as raised:
        save_checkpoint(learner, RunFolder(tmp_path), step=3, **given)
    assert said or raised.value is error
    assert list(RunFolder(tmp_path).checkpoints.iterdir()) == []


def test_every_file_is_on_the_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    aside, final = tmp_path / ".aside", tmp_path / "step_000001"
    (aside / "hf").mkdir(parents=True)
    for name in ("state.json", "hf/model.safetensors"):
        (aside / name).write_text("x")
    events, rename = [], Path.rename
    named = lambda file: events.append(os.readlink(f"/proc/self/fd/{file}"))  # noqa: E731
    monkeypatch.setattr(os, "fsync", named)
    renamed = lambda *paths: events.append("renamed") or rename(*paths)  # noqa: E731
    monkeypatch.setattr(Path, "rename", renamed)
    flush_and_rename(aside, final)

    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    written = ("", "/hf", "/state.json", "/hf/model.safetensors")
    assert {*before} == {f"{aside}{name}" for name in written}
    assert after == [str(tmp_path)]
    assert (final / "hf" / "model.safetensors").exists()
