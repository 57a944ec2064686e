"""What lies on the disk decides too: the model's folder, and the run's own."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import ConfigError, Run
from tests.support.composing import REPO, Changes, changed, chosen, only_problem


def hf(path: Path | str) -> Changes:
    node = chosen("model", "hf") | {"path": str(path), "max_seq_len": 256, "max_tokens": 32}
    return {"model": node}


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_local_model_that_is_not_there_is_refused(path: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        check(changed(config, hf(path)))


def test_a_model_folder_needs_a_config(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        check(changed(config, hf(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    check(changed(config, hf(tmp_path)))


def test_a_name_on_the_hub_is_left_to_the_download(config: dict[str, Any]) -> None:
    check(changed(config, hf("Qwen/Qwen3-0.6B")))


class Folder:
    """A run folder as an earlier run has left it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.path = Path(config["output_dir"]) / config["run_name"]
        self.path.mkdir(parents=True)
        Run.of(config).save(self.path / "config.yaml")
        (self.path / "metrics.jsonl").write_text('{"step": 0}\n')


def test_a_folder_that_holds_a_run_is_refused_with_both_ways_out(config: dict[str, Any]) -> None:
    folder = Folder(config)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.problems == [
        f"{folder.path} already holds a run: go on with it by resume=true, or choose another "
        "run_name"
    ]
    check(changed(config, {"run_name": "other"}))


def test_resuming_needs_a_run(config: dict[str, Any]) -> None:
    problem = only_problem(changed(config, {"resume": True}))
    assert "here holds no run: give run_name=<a folder in " in problem


@pytest.mark.parametrize("inside", [True, False], ids=["then outside", "then inside"])
def test_a_path_of_ours_is_the_same_wherever_a_run_is_started(
    inside: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From our folder it is saved as models/tiny-wiki, from elsewhere as an absolute path."""
    relative, absolute = "models/tiny-wiki", str(REPO / "models" / "tiny-wiki")
    config = changed(config, hf(relative if inside else absolute))
    monkeypatch.chdir(REPO if inside else tmp_path)
    folder = Folder(changed(config, {"output_dir": str(tmp_path / "runs")}))
    again = changed(config, {"output_dir": str(folder.path.parent), "resume": True})
    monkeypatch.chdir(tmp_path if inside else REPO)
    check(changed(again, {"model.path": absolute if inside else relative}))
    (problem,) = run_folder_problems(changed(again, {"model.path": str(REPO / "tests")}))
    assert "tiny-wiki and is " in problem


def test_resuming_may_change_how_long_and_how_but_not_what_is_learned(
    config: dict[str, Any],
) -> None:
    Folder(config)
    check(changed(config, {"resume": True, "max_steps": 500, "trainer.checkpoint_every": 5}))
    with pytest.raises(ConfigError) as caught:
        check(changed(config, {"resume": True, "optim.beta1": 0.5, "loss": chosen("loss", "grpo")}))
    (problem,) = caught.value.problems
    assert "optim.beta1 was 0.9 and is 0.5" in problem
    assert "loss._target_ was losses.cispo.cispo and is losses.ppo_clip.ppo_clip" in problem
    assert problem.endswith("repeat the overrides of that run, or start a new one")


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_failed_before_its_first_step_blocks_nothing(
    config: dict[str, Any], resume: bool
) -> None:
    folder = Folder(changed(config, {"optim.beta1": 0.5}))
    (folder.path / "metrics.jsonl").write_text("")
    check(changed(config, {"resume": resume}))
    (folder.path / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(ConfigError):
        check(changed(config, {"resume": resume}))


def test_the_folder_of_an_evaluation_is_taken(
    config: dict[str, Any],
) -> None:
    folder = Folder(config)
    (folder.path / "metrics.jsonl").unlink(missing_ok=True)
    (folder.path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a run"):
        check(config)


@pytest.mark.parametrize("name", ["x" * 300, "ü" * 128, "below/" + "y" * 256])
def test_a_name_that_no_folder_can_have_is_refused(config: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match="a folder's name takes 255: choose a shorter run_name"):
        check(changed(config, {"run_name": name}))
    check(changed(config, {"run_name": "x" * 255}))


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler.rollout_timeout": 10.0, "sampler.max_concurrent": 4, "sampler.max_retries": 0},
        {"trainer.tokens_per_micro_batch": 512, "trainer.ranks": 2, "trainer.wait_timeout": 900},
        {"inference.args": {"max_num_seqs": 4}, "sync.probe_every": 0},
    ],
)
def test_resuming_may_change_what_is_no_learning(changes: Changes, config: dict[str, Any]) -> None:
    Folder(config)
    check(changed(config, {"resume": True, **changes}))


def test_resuming_may_change_of_a_part_of_a_mixture_what_it_may_of_one_alone(
    config: dict[str, Any],
) -> None:
    words = {**chosen("env", "reverse-text"), "max_concurrent": 4, "tool_timeout": 9.0}
    limits = {"words": {"max_tokens": 8, "rollout_timeout": 30.0}}
    mixture = {"_target_": "envs.mixture.Mixture", "weights": {"words": 1.0}, "sampling": limits}
    config = changed(config, {"env": {**mixture, "envs": {"words": words}}})
    Folder(config)
    slower = {"env.envs.words.max_concurrent": 2, "env.envs.words.tool_timeout": 99.0}
    patient = {"env.sampling.words.rollout_timeout": 60.0}
    check(changed(config, {"resume": True, **slower, **patient}))
    for key, value in (("env.sampling.words.max_tokens", 9), ("env.envs.words.max_length", 4)):
        assert f"{key} was " in only_problem(changed(config, {"resume": True, key: value}))


def test_resuming_may_change_where_a_teacher_is_and_how_often_it_is_asked(
    config: dict[str, Any],
) -> None:
    teacher = {**chosen("reference", "endpoint"), "url": "http://there/v1", "model": "t"}
    config = changed(config, {"loss": chosen("loss", "distill"), "reference": teacher})
    Folder(config)
    elsewhere = {"url": "http://here/v1", "timeout": 9.0, "max_retries": 99}
    check(changed(config, {"resume": True, "reference": {**teacher, **elsewhere}}))
    another = {"resume": True, "reference": {**teacher, "model": "another"}}
    assert "reference.model was t and is another" in only_problem(changed(config, another))


def test_resuming_may_not_change_the_longest_gradient(config: dict[str, Any]) -> None:
    Folder(config)
    problem = only_problem(changed(config, {"resume": True, "trainer.max_grad_norm": 9.0}))
    assert "trainer.max_grad_norm was 1.0 and is 9.0" in problem


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resuming_may_not_change_the_ranks_that_zero_has_split_the_optimizer_over(
    stage: int, config: dict[str, Any]
) -> None:
    config = changed(config, {"trainer.ranks": 1})
    config["deepspeed"] = {"zero_optimization": {"stage": stage}}
    Folder(config)
    # Null is asked about again when it is known how many devices there are.
    check(changed(config, {"resume": True, "trainer.ranks": None}))
    problem = only_problem(changed(config, {"resume": True, "trainer.ranks": 2}))
    assert problem.startswith(f"trainer.ranks was 1 and is 2, but with ZeRO stage {stage}")
    assert problem.endswith("use trainer.ranks=1")


@pytest.mark.parametrize("name", ["", ".", "./", "..", "/tmp/x", "a/../b"])
def test_a_run_has_a_folder_of_its_own_below_output_dir(name: str, config: dict[str, Any]) -> None:
    problem = only_problem(changed(config, {"run_name": name}))
    assert problem.startswith(f'run_name="{name}" is no name for a folder below output_dir=')


def test_a_run_of_format_1_is_refused_with_the_commit_that_can_resume_it(
    config: dict[str, Any],
) -> None:
    saved = Folder(config).path / "config.yaml"
    check(changed(config, {"resume": True}))
    content = yaml.safe_load(saved.read_text())
    assert content.pop("format") == 2
    saved.write_text(yaml.safe_dump(content))
    problem = only_problem(changed(config, {"resume": True}))
    assert problem == (
        f"{saved} is of format 1, which this version cannot resume: use commit 4df5c0c, or start "
        "a new run"
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"max_steps: [", b"[1]", b"\x80"])
def test_a_run_whose_configuration_is_damaged_is_named(
    content: bytes, config: dict[str, Any]
) -> None:
    saved = Folder(config).path / "config.yaml"
    saved.write_bytes(content)
    problem = only_problem(changed(config, {"resume": True}))
    assert problem.startswith(f"{saved} is damaged")
