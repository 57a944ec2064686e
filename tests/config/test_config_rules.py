"""Each senseless combination is refused in one sentence; its neighbours that make sense are not."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from composing import CONF

from rl.config import ConfigError, Run, check

Changes = Mapping[str, Any]


def changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The configuration with dotted keys set, and nodes replaced by the choice of a YAML file."""
    config = deepcopy(config)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


def chosen(group: str, choice: str) -> dict[str, Any]:
    """A node as its YAML file says, without Hydra's part."""
    node = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text())
    node.pop("defaults", None)
    return node


NONE = chosen("advantage", "none")
SFT = {
    "loss": chosen("loss", "sft"),
    "sampler": chosen("sampler", "demonstrations"),
    "advantage": NONE,
}
GSPO = {"loss": chosen("loss", "gspo")}
SEQUENCE_MEAN = chosen("aggregation", "sequence_mean")

REFUSED: dict[str, tuple[Changes, str]] = {
    "batch_size": (
        {"batch_size": 250},
        "batch_size=250 is no multiple of group_size=16: use batch_size=240 or 256, or another "
        "group_size",
    ),
    "batch below a group": ({"batch_size": 8}, "use batch_size=16, or another group_size"),
    "more ranks than rollouts": (
        {"trainer.ranks": 8, "batch_size": 4, "group_size": 4},
        "batch_size=4 leaves some of trainer.ranks=8 idle: use at most 4",
    ),
    "group of one": ({"group_size": 1}, "group_size=1 with losses.advantages.group_mean makes"),
    "negative seed": ({"seed": -1}, "seed=-1, but it must be >= 0"),
    "no steps": ({"max_steps": 0, "optim.warmup_steps": 0}, "max_steps=0, but it must be >= 1"),
    "empty batch": ({"batch_size": 0}, "batch_size=0, but it must be >= 1"),
    "greedy": ({"sampler.temperature": 0.0}, "sampler.temperature=0.0, but it must be > 0"),
    "top_p too large": (
        {"sampler.top_p": 1.5, "sampler.allow_biased_ratio": True},
        "sampler.top_p=1.5, but it must be > 0 and <= 1",
    ),
    "beta": ({"optim.beta2": 1.0}, "optim.beta2=1.0, but it must be >= 0 and < 1"),
    "turn as long as the row": (
        {"sampler.max_tokens": 256},
        "sampler.max_tokens=256 leaves no room for the prompt in max_seq_len=256",
    ),
    "row longer than the model": (
        {"max_seq_len": 512},
        "max_seq_len=512 exceeds model.max_seq_len=256: raise that one instead",
    ),
    "gspo per token": (GSPO, "long sequences count more: use aggregation=sequence_mean"),
    "sapo per token": ({"loss": chosen("loss", "sapo")}, "use aggregation=sequence_mean"),
    "bounds": (
        {"loss.clip_low": 5.0},
        "loss.clip_low=5.0 is not below loss.clip_high=5.0: swap them",
    ),
    "band": (
        {"loss": {**chosen("loss", "masked_is"), "ratio_low": 9.0}},
        "loss.ratio_low=9.0 is not below loss.ratio_high=8.0: swap them",
    ),
    "dual clip": (
        {"loss": {**chosen("loss", "ppo_clip"), "dual_clip": 0.5}},
        "loss.dual_clip=0.5 is a ratio and must exceed 1",
    ),
    "imitating oneself": ({"loss": SFT["loss"]}, "add sampler=demonstrations, or choose another"),
    "rewarding demonstrations": ({"sampler": SFT["sampler"]}, "add loss=sft, or choose"),
    "warm-up longer than the run": (
        {"max_steps": 4},
        "optim.warmup_steps=5 is more than max_steps=4, so the learning rate is never reached",
    ),
    "patience": (
        {"sampler.rollout_timeout": 700.0},
        "one slow rollout (sampler.rollout_timeout=700.0 s) would stop the run",
    ),
    "nothing is rewarded": (
        {"env.reward_weights": {"exact": 0.0}},
        "env.reward_weights={'exact': 0.0} makes every reward 0: give one a weight",
    ),
    "run without a name": ({"run_name": ""}, 'run_name="" is no name for a folder'),
    "run elsewhere": ({"run_name": "../../there"}, "is no name for a folder below output_dir"),
}

ALLOWED: dict[str, Changes] = {
    "as shipped": {},
    "one rollout per example without a baseline": {"group_size": 1, "advantage": NONE},
    "gspo per sequence": {**GSPO, "aggregation": SEQUENCE_MEAN},
    "imitating demonstrations": SFT,
    "imitating one demonstration each": {**SFT, "group_size": 1},
    "truncated sampling without a ratio": {
        "loss": chosen("loss", "reinforce"),
        "sampler.top_p": 0.9,
    },
    "truncated sampling, knowingly": {"sampler.top_p": 0.9, "sampler.allow_biased_ratio": True},
    "short run": {"max_steps": 2, "optim.warmup_steps": 2},
    "one of several rewards": {"env.reward_weights": {"exact": 0.0, "similarity": 1.0}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_senseless_combination_is_refused_in_one_sentence(
    name: str, config: dict[str, Any]
) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check(changed(config, changes))
    (problem,) = caught.value.problems
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_a_combination_that_makes_sense_is_allowed(name: str, config: dict[str, Any]) -> None:
    check(changed(config, ALLOWED[name]))


RATIO_LOSSES = ("cispo", "ppo_clip", "grpo", "gspo", "masked_is", "dppo", "sapo")


@pytest.mark.parametrize("loss", RATIO_LOSSES)
@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
    ],
)
def test_a_ratio_to_truncated_sampling_needs_a_yes(
    loss: str, knob: str, value: float, config: dict[str, Any]
) -> None:
    changes = {
        "loss": chosen("loss", loss),
        "aggregation": SEQUENCE_MEAN,
        f"sampler.{knob}": value,
    }
    with pytest.raises(ConfigError) as caught:
        check(changed(config, changes))
    (problem,) = caught.value.problems
    assert problem.startswith(f"sampler.{knob}={value} changes what is sampled")
    assert problem.endswith("accept that with sampler.allow_biased_ratio=true")
    check(changed(config, {**changes, "sampler.allow_biased_ratio": True}))


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
        Run(**config).save(self.path / "config.yaml")


def test_a_folder_that_holds_a_run_is_refused_with_both_ways_out(config: dict[str, Any]) -> None:
    folder = Folder(config)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert caught.value.problems == [
        f"{folder.path} already holds a run: go on with it by resume=true, or choose another "
        "run_name"
    ]
    check(changed(config, {"run_name": "other"}))


def test_resuming_needs_a_run_and_names_those_there_are(config: dict[str, Any]) -> None:
    Folder(changed(config, {"run_name": "yesterday"}))
    with pytest.raises(ConfigError) as caught:
        check(changed(config, {"resume": True}))
    (problem,) = caught.value.problems
    assert "here holds no run" in problem
    assert "outputs: yesterday>" in problem


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
