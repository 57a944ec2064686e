"""Which run folders a run may start or resume in, and from which checkpoints it may start."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.initial import initial_checkpoint
from rl.config.positions import ADAPTER
from rl.config.resume_rules import resume_problems, run_folder_problems
from rl.config.schema import ConfigError, Run
from rl.runtime.code_copies import copy_code
from rl.runtime.folder import RunFolder
from tests.support.composing import changed, composed, only_problem, with_choices


def trained(config: dict[str, Any]) -> Path:
    """Return the folder of a run with one step."""
    path = Path(config["output_dir"]) / config["run_name"]
    path.mkdir(parents=True)
    Run.of(config).save(path / "config.yaml")
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    return path


SHARDED = {"trainer.ranks": 1, "deepspeed": "=zero1"}
TWO = {"env.reward_weights": {"exact": 1.0, "similarity": 0.5}}
FOUR = {"batch_size": 8, "group_size": 2, "seed": 7, "kl.beta": 0.25}
MORE, RANKS = {"trainer.ranks": 2}, "trainer.ranks was 1 and is 2, but with ZeRO stage "


@pytest.mark.parametrize(
    ("run", "changes", "said"),
    [
        ({}, {"max_steps": 500, "inference.args": {"seed_": 4}, **MORE}, ""),
        (SHARDED, {}, ""),
        ({}, {"optim.beta1": 0.5}, "optim.beta1 was 0.9 and is 0.5; repeat the overrides of that"),
        ({}, FOUR, " (and 1 more); repeat the overrides of that run"),  # three are shown
        ({}, {"loss": "=grpo"}, "was losses.cispo.cispo and is losses.ppo_clip.ppo_clip"),
        (TWO, {"env.reward_weights": {"exact": 1.0}}, "similarity was 0.5 and is None"),
        (SHARDED, MORE, f"{RANKS}1"),
        ({**SHARDED, "deepspeed": "=zero3"}, MORE, f"{RANKS}3"),
    ],
)
def test_a_resume_may_take_other_time_and_places_but_not_learn_otherwise(
    run, changes, said, config
):
    trained(before := with_choices(config, run))
    again = with_choices(before, {"resume": True, **changes})
    if said:
        assert said in only_problem(again)
    else:
        check(again)


MAY_CHANGE = (
    *("max_time", "stop_when", "logger._target_", "accept_changed_code", "learned.x"),
    *("trainer.checkpoint_every", "sampler.max_retries", "client.max_retries", "num_rounds"),
    *("env.tool_timeout", "env.envs.a.max_concurrent", "env.sampling.a.rollout_timeout"),
    *("reference.url", "reference.teachers.a.timeout", "reflection.api_key_variable"),
)
MAY_NOT = (
    *("seed", "init_from", "client.url", "env.envs.a.max_length", "env.sampling.a.max_tokens"),
    *("reference.model", "reference.teachers.a.path", "reflection.model", "sampler.seeded"),
    *("max_step", "reward_weights", "trainer.max_grad_norm"),
)


@pytest.mark.parametrize("key", [*MAY_CHANGE, *MAY_NOT])
def test_a_resume_may_change_what_the_run_hardly_learns_from(key, tmp_path):
    before: Any = 1
    now: Any = 2
    for name in reversed(key.split(".")):
        before, now = {name: before}, {name: now}
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump({"format": 2, **before}))
    assert len(list(resume_problems(now, saved))) == (key in MAY_NOT)


def test_a_folder_that_holds_a_run_is_refused_with_two_remedies(config):
    problem = only_problem(changed(config, {"resume": True}))
    assert "here holds no run: give run_name=<a folder in " in problem
    folder = trained(config)
    said, remedy = f"{folder} already holds a run: ", "choose another run_name"
    assert only_problem(config) == f"{said}use resume=true to continue it, or {remedy}"
    check(changed(config, {"run_name": "other"}))
    evaluation = {key: config[key] for key in ("output_dir", "run_name")}  # it cannot resume
    assert list(run_folder_problems(evaluation)) == [said + remedy]
    (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").write_text("{}")  # of an evaluation
    assert said in only_problem(config)
    (folder / "summary.json").unlink()
    (folder / "config.yaml").rename(folder / "overrides.yaml")  # as if killed before its start
    check(changed(config, {"resume": True}))


def test_a_resume_with_changed_user_code_is_refused_unless_it_is_accepted(
    config, monkeypatch, tmp_path
):
    folder, mine, data = trained(config), tmp_path / "mine.py", tmp_path / "data.jsonl"
    monkeypatch.chdir(tmp_path)
    mine.write_text("before\n")
    data.write_text("before\n")
    copy_code(RunFolder(folder), [str(mine)], [str(tmp_path / "*.jsonl")])
    again = changed(config, {"resume": True})
    mine.write_text("after\n")
    data.write_text("after!\n")
    check(again)  # no step is in a checkpoint, so the changed code computes all steps
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    assert only_problem(again) == (
        f"mine.py, data.jsonl changed since {folder} was trained: restore the files "
        f"(copies of code are in {folder}/code), start a new run, or continue "
        "with the changed files by accept_changed_code=true"
    )
    check(changed(again, {"accept_changed_code": True}))


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_failed_before_its_first_step_may_be_repeated_with_other_settings(
    config, resume
):
    folder = trained(changed(config, {"optim.beta1": 0.5}))
    (folder / "metrics.jsonl").write_text("")
    check(changed(config, {"resume": resume}))
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(ConfigError):
        check(changed(config, {"resume": resume}))


OUTSIDE = ["", ".", "./", "..", "/tmp/x", "a/../b", "../../there"]


@pytest.mark.parametrize("name", [*OUTSIDE, "a\x1b[2J", "a\nb", "a\ud800"])
def test_a_run_has_a_printable_folder_of_its_own_below_output_dir(name, config):
    problem = only_problem(changed(config, {"run_name": name}))
    if name in OUTSIDE:
        assert problem.startswith(f'run_name="{name}" names no folder below output_dir=')
    else:
        assert problem.startswith(f"run_name={name!r} contains unprintable characters")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seed: 0\nformat: 1", "is of format 1, which this version cannot resume: use the"),
        *((text, "is damaged") for text in (b"", b"max_steps: [", b"[1]", b"\x80")),
    ],
)
def test_a_configuration_that_cannot_be_resumed_is_named(content, said, config):
    saved = trained(config) / "config.yaml"
    saved.write_bytes(content)
    problem = only_problem(changed(config, {"resume": True}))
    assert problem.startswith(f"{saved} {said}")


@pytest.fixture
def first(tmp_path):
    """Return a run with checkpoints of the steps 5 and 10."""
    run = RunFolder(tmp_path / "first")
    for step in (5, 10):
        (run.checkpoint(step) / "hf").mkdir(parents=True)
        run.state_of(run.checkpoint(step)).write_text('{"step": 1, "rollouts": {}}')
    return run


def test_a_run_is_named_by_folder_or_name_and_step_and_refused_without_a_model_to_start_from(first):
    settings = {"output_dir": str(first.path.parent)}
    for name, step in (("first", 10), ("first:5", 5), (str(first.path), 10), (f"{first}:5", 5)):
        assert initial_checkpoint({**settings, "init_from": name}) == first.checkpoint(step)
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
    adapter = only_problem(changed(config, {"init_from": "first"}))
    assert f"init_from=first, but {first.checkpoint(10)}/hf contains only an adapter: " in adapter
    assert adapter.endswith("/hf merged`, then use model=hf model.path=merged instead of init_from")


@pytest.mark.parametrize(
    ("before", "other", "said"),
    [
        ([], ["deepspeed=zero2"], "with deepspeed.zero_optimization.stage=0, but .*stage=2: use"),
        ([], ["optim=muon"], "with optim._target_=rl.learner.optim.AdamW, but optim._targ.*Muon"),
        ([], ["trainer.max_grad_norm=9"], "with trainer.max_grad_norm=1.0, but .*=9: use"),
        (["optim=muon"], ["optim.momentum=0.5"], "with optim.momentum=0.95, but .*=0.5: use"),
        ([], ["optim.learning_rate=0.5", "optim.warmup_steps=9"], ""),
        ([], ["trainer.ranks=4"], ""),  # without sharding all ranks load one file
        (["deepspeed=zero2"], ["trainer.ranks=2"], "with trainer.ranks=1, but .*: use .*=1"),
        (["deepspeed=zero2"], ["trainer.ranks=null"], ""),
    ],
)
def test_an_optimizer_that_deepspeed_cannot_load_is_refused(before, other, said, first):
    Run.of(composed("trainer.ranks=1", *before)).save(first.config)
    names = [f"output_dir={first.path.parent}", "run_name=second", "init_from=first"]
    config = composed(*names, "init_optimizer=true", *before, *other)
    if said:
        assert re.search(f"loads the optimizer of {first} {said}", only_problem(config))
    else:
        check(config)
