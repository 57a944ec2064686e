"""A run that starts from a checkpoint of another run."""

import re
from typing import Any

import pytest

from rl.config.check import check
from rl.config.initial import initial_checkpoint
from rl.config.positions import ADAPTER
from rl.config.schema import ConfigError, Run
from rl.runtime.folder import RunFolder
from rl.supervisor.supervise import _Launch
from tests.support.composing import changed, composed, only_problem


@pytest.fixture
def first(tmp_path):
    """Return a run with checkpoints of the steps 5 and 10."""
    run = RunFolder(tmp_path / "first")
    for step in (5, 10):
        (run.checkpoint(step) / "hf").mkdir(parents=True)
        run.state_of(run.checkpoint(step)).write_text('{"step": 1, "rollouts": {}}')
    return run


def test_a_run_is_named_by_its_folder_or_its_name_and_a_step(first):
    settings = {"output_dir": str(first.path.parent)}
    for name, step in (("first", 10), ("first:5", 5), (str(first.path), 10), (f"{first}:5", 5)):
        assert initial_checkpoint({**settings, "init_from": name}) == first.checkpoint(step)
    assert initial_checkpoint({**settings, "init_from": None}) is None


def test_the_parent_of_a_run_is_read_from_its_initial_model(first, tmp_path):
    child = RunFolder(tmp_path / "second")
    child.path.mkdir()
    child.set_model(first.checkpoint(5) / "hf")
    assert child.started_from == "first, step 5"
    child.set_model(tmp_path / "model")
    assert (child.started_from, first.started_from) == ("", "")


def test_a_missing_checkpoint_and_an_adapter_are_refused(first):
    config = composed(f"output_dir={first.path.parent}", "run_name=second")
    missing = changed(config, {"init_from": "first:7"})
    said = "init_from=first:7, but first has checkpoints only of the steps [5, 10]: name a run "
    assert said in only_problem(missing)
    nowhere = only_problem(changed(config, {"init_from": "frist"}))
    assert f" or {first.path.parent / 'frist'}: name a run " in nowhere
    only = changed(config, {"init_optimizer": True})
    assert only_problem(only).startswith("init_optimizer=true loads the optimizer of another run")
    lora = composed(f"output_dir={first.path.parent}", "run_name=second", "adapter=lora")
    both = changed(lora, {"init_from": "first", "init_optimizer": True})
    assert "but this run trains an adapter" in only_problem(both)
    (first.checkpoint(10) / "hf" / ADAPTER).write_text("{}")
    adapter = changed(config, {"init_from": "first"})
    assert f"{first.checkpoint(10)} contains only an adapter: name a run" in only_problem(adapter)


def test_a_resumed_run_without_model_and_parent_has_a_sentence_not_a_traceback(tmp_path):
    run = Run.of(composed(f"output_dir={tmp_path}", "init_from=gone", "resume=true"))
    launch: Any = _Launch(RunFolder(run.folder), *[None] * 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="init_from=gone"):
        launch.prepare_model(run, None)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (["deepspeed=zero2"], "with deepspeed.zero_optimization.stage=0, but .*stage=2: use"),
        (["optim=muon"], "with optim._target_=rl.learner.optim.AdamW, but optim._target_=.*Muon"),
        (["model.dtype=float32"], "with model.dtype=bfloat16, but model.dtype=float32: use"),
        (["trainer.ranks=4"], ""),  # without sharding all ranks load one file
    ],
)
def test_an_optimizer_that_deepspeed_cannot_load_is_refused(other, said, first):
    Run.of(composed("trainer.ranks=1")).save(first.config)
    names = [f"output_dir={first.path.parent}", "run_name=second", "init_from=first"]
    config = composed(*names, "init_optimizer=true", *other)
    if said:
        assert re.search(f"loads the optimizer of {first} {said}", only_problem(config))
    else:
        check(config)


def test_sharded_optimizer_states_need_the_same_number_of_ranks(first):
    Run.of(composed("deepspeed=zero2", "trainer.ranks=1")).save(first.config)
    names = [f"output_dir={first.path.parent}", "run_name=second", "init_from=first"]
    config = composed(*names, "init_optimizer=true", "deepspeed=zero2", "trainer.ranks=2")
    assert "with trainer.ranks=1, but trainer.ranks=2: use trainer.ranks=1" in only_problem(config)
    check(changed(config, {"trainer.ranks": None}))
