"""When a checkpoint is complete, and how many stay; the learner is a stand-in."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rl.run.folder import RunFolder
from rl.trainer.checkpoint import save_checkpoint


class Broken(RunFolder):
    """A folder in which no state can be written."""

    @staticmethod
    def state_of(checkpoint: Path) -> Path:
        return checkpoint / "missing" / "state.json"


@pytest.fixture
def save():
    """Saves the checkpoint of a step."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    policy = SimpleNamespace(
        ranks=SimpleNamespace(first=True), export=lambda folder, model: folder.mkdir()
    )
    learner = SimpleNamespace(policy=policy, save=lambda folder: None)

    def one(folder: RunFolder, step: int, keep: int = 2) -> Path:
        state = {"step": step}
        return save_checkpoint(
            learner, folder, step=step, rollouts=state, model=folder.path, keep=keep
        )

    yield one
    dist.destroy_process_group()


def test_a_checkpoint_without_its_state_is_none(save, tmp_path):
    with pytest.raises(Exception, match="state"):
        save(Broken(tmp_path), 1)
    assert RunFolder(tmp_path).complete_checkpoints() == []


def test_as_many_stay_as_were_asked_for_and_they_are_the_newest(save, tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 4):
        save(folder, step)
    assert folder.complete_checkpoints() == [folder.checkpoint(3), folder.checkpoint(4)]
    resumed = folder.resumed()
    assert (resumed.step, resumed.rollouts) == (4, {"step": 4})
