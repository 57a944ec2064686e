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
from rl.supervisor.supervise import _Launch
from tests.support.composing import REPO, changed, composed, only_problem, with_choices


def trained(config: dict[str, Any]) -> Path:
    """Return the folder of a run with one step."""
    path = Path(config["output_dir"]) / config["run_name"]
    path.mkdir(parents=True)
    Run.of(config).save(path / "config.yaml")
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    return path


SHARDED = {"trainer.ranks": 1, "deepspeed": "=zero1"}
TWO = {"env.reward_weights": {"exact": 1.0, "similarity": 0.5}}
MORE, RANKS = {"trainer.ranks": 2}, "trainer.ranks was 1 and is 2, but with ZeRO stage "


@pytest.mark.parametrize(
    ("run", "changes", "said"),
    [
        ({}, {"max_steps": 500, "inference.args": {"seed_": 4}, **MORE}, ""),
        (SHARDED, {}, ""),
        ({}, {"optim.beta1": 0.5}, "optim.beta1 was 0.9 and is 0.5; repeat the overrides of that"),
        ({}, {"loss": "=grpo"}, "was losses.cispo.cispo and is losses.ppo_clip.ppo_clip"),
        (TWO, {"env.reward_weights": {"exact": 1.0}}, "similarity was 0.5 and is None"),
        (SHARDED, MORE, f"{RANKS}1"),
        ({**SHARDED, "deepspeed": "=zero2"}, MORE, f"{RANKS}2"),
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
    *("max_time", "stop_when", "cluster.interface", "logger._target_", "evaluation.every"),
    *("record.columns", "accept_changed_code", "init_optimizer", "learned.x", "sync.probe_every"),
    *("trainer.checkpoint_every", "trainer.tokens_per_micro_batch", "client.max_retries"),
    *(f"sampler.{key}" for key in ("rollout_timeout", "max_concurrent", "max_retries")),
    *(f"env{at}.{key}" for at in ("", ".envs.a") for key in ("max_concurrent", "tool_timeout")),
    *("env.sampling.a.rollout_timeout", "max_calls", "num_rounds", "reflection.base_url"),
    *("reference.url", "reference.teachers.a.url"),
    *(
        f"{path}.{key}"
        for path in ("reflection", "reference", "reference.teachers.a")
        for key in ("api_key_variable", "timeout", "max_retries")
    ),
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


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, " (and 1 more)"), (5, " (and 2 more)")])
def test_three_changed_keys_are_shown_and_the_others_are_counted(count, more, config):
    trained(config)
    changes = {"batch_size": 8, "group_size": 2, "seed": 7, "entropy_bonus": 0.5, "kl.beta": 0.25}
    other = dict(list(changes.items())[:count])
    problem = only_problem(changed(config, {**other, "resume": True}))
    assert f"{more}; repeat the overrides of that run" in problem
    assert problem.count(" was ") == 3


def test_a_folder_that_holds_a_run_is_refused_with_two_remedies(config):
    problem = only_problem(changed(config, {"resume": True}))
    assert "here holds no run: give run_name=<a folder in " in problem
    folder = trained(config)
    (folder / "config.yaml").rename(folder / "kept")
    (folder / "metrics.jsonl").rename(folder / "overrides.yaml")  # as if killed before its start
    check(changed(config, {"resume": True}))
    (folder / "overrides.yaml").rename(folder / "metrics.jsonl")
    (folder / "kept").rename(folder / "config.yaml")
    said, remedy = f"{folder} already holds a run: ", "choose another run_name"
    assert only_problem(config) == f"{said}use resume=true to continue it, or {remedy}"
    check(changed(config, {"run_name": "other"}))
    evaluation = {key: config[key] for key in ("output_dir", "run_name")}  # it cannot resume
    assert list(run_folder_problems(evaluation)) == [said + remedy]
    (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").write_text("{}")  # of an evaluation
    assert said in only_problem(config)


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


@pytest.mark.parametrize("inside", [True, False], ids=["then outside", "then inside"])
def test_a_shipped_path_is_the_same_in_every_working_directory(
    inside, config, monkeypatch, tmp_path
):
    relative, absolute = "models/tiny-wiki", str(REPO / "models" / "tiny-wiki")
    hf = {"model": "=hf", "model.max_seq_len": 256, "model.max_tokens": 32}
    config["output_dir"] = str(tmp_path / "runs")
    config = with_choices(config, {**hf, "model.path": relative if inside else absolute})
    monkeypatch.chdir(REPO if inside else tmp_path)
    trained(config)
    again = changed(config, {"resume": True})
    monkeypatch.chdir(tmp_path if inside else REPO)
    check(changed(again, {"model.path": absolute if inside else relative}))
    (problem,) = run_folder_problems(changed(again, {"model.path": str(REPO / "tests")}))
    assert "tiny-wiki and is " in problem


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
        *((text, "is damaged") for text in (b"", b"{}", b"max_steps: [", b"[1]", b"\x80")),
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
    adapter = only_problem(changed(config, {"init_from": "first"}))
    assert f"init_from=first, but {first.checkpoint(10)}/hf contains only an adapter: " in adapter
    assert adapter.endswith("/hf merged`, then use model=hf model.path=merged instead of init_from")


def test_a_resumed_run_without_model_and_parent_has_a_sentence_not_a_traceback(tmp_path):
    run = Run.of(composed(f"output_dir={tmp_path}", "init_from=gone", "resume=true"))
    launch: Any = _Launch(RunFolder(run.folder), *[None] * 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="init_from=gone"):
        launch.prepare_model(run, None)


@pytest.mark.parametrize(
    ("before", "other", "said"),
    [
        ([], ["deepspeed=zero2"], "with deepspeed.zero_optimization.stage=0, but .*stage=2: use"),
        ([], ["optim=muon"], "with optim._target_=rl.learner.optim.AdamW, but optim._targ.*Muon"),
        ([], ["model.dtype=float32"], "with model.dtype=bfloat16, but model.dtype=float32: use"),
        ([], ["optim.weight_decay=0.5"], "with optim.weight_decay=0.0, but optim.weight_decay=0.5"),
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
