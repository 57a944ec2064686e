"""Check the sentences of rules.py about values, files and secrets, and values that are allowed.

tests/test_compositions.py checks the sentences about pairs of choices.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from rl.config.check import check
from rl.config.rules import secret_problems
from rl.config.schema import ConfigError
from rl.config.transport import VLLM_RANKS, adapter_obstacle
from tests.support.composing import REPO, Changes, changed, chosen, composed, only_problem

ZERO = {stage: {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)}
MUON = {**chosen("optim", "adamw"), **chosen("optim", "muon"), "learning_rate": 1e-3}
VERIFIERS = {**chosen("env", "verifiers"), "id": "x"}
MIXTURE = {
    "_target_": "envs.mixture.Mixture",
    "envs": {"words": chosen("env", "reverse-text")},
    "weights": {"words": 1.0},
}


def lora(**options: Any) -> Changes:
    return {"adapter": {**chosen("adapter", "lora"), **options}}


def limited(**limits: Any) -> Changes:
    return MIXTURE | {"sampling": {"words": limits}}


def teacher(path: Path | str) -> Changes:
    node = {**chosen("reference", "model"), "path": str(path), "dtype": "float32"}
    return {"loss": chosen("loss", "distill"), "reference": node}


SYNC_ADAPTER = {"sync": chosen("sync", "auto") | chosen("sync", "adapter")}

REFUSED: dict[str, tuple[Changes, str]] = {
    "batch_size": (
        {"batch_size": 250},
        "batch_size=250 is not a multiple of group_size=16: use batch_size=240 or 256, or another "
        "group_size",
    ),
    "batch below a group": ({"batch_size": 8}, "use batch_size=16, or another group_size"),
    "more ranks than rollouts": (
        {"trainer.ranks": 8, "batch_size": 4, "group_size": 4},
        "batch_size=4 is below trainer.ranks=8: use trainer.ranks=4",
    ),
    "strategy and demonstrations": (
        {
            "strategy": chosen("strategy", "extremes"),
            "sampler": chosen("sampler", "demonstrations"),
            "loss": chosen("loss", "sft"),
        },
        "rl.sampling.strategies.Extremes samples from the policy, but "
        "rl.sampling.demonstrations.DemonstrationSampler starts no vLLM: use strategy=independent",
    ),
    "strategy and stop texts": (
        {"strategy": chosen("strategy", "branch"), "sampler.stop": ["</a>"]},
        "rl.sampling.branch.Branch may prefill the start of a turn, where vLLM does not look for "
        "sampler.stop=['</a>']: set sampler.stop=[], or use another strategy",
    ),
    "strategy and stop texts of one environment": (
        {"strategy": chosen("strategy", "branch"), "env": limited(stop=["</a>"])},
        "look for env.sampling.words.stop=['</a>']: set env.sampling.words.stop=[], or use another",
    ),
    "head dtype and overrides": (
        {"model.head_dtype": "float32", "inference.args": {"hf-overrides": "{}"}},
        "model.head_dtype=float32 and inference.args.hf_overrides exclude each other",
    ),
    "turn as long as the row": (
        {"sampler.max_tokens": 256},
        "sampler.max_tokens=256 leaves no room for the prompt in max_seq_len=256",
    ),
    "turn of one environment as long as the row": (
        {"env": limited(max_tokens=256)},
        "env.sampling.words.max_tokens=256 leaves no room for the prompt in max_seq_len=256",
    ),
    "prompts that only vLLM measures": (
        {"sampler.max_prompt_len": 200, "client": chosen("client", "tokens")},
        "length of a prompt of rl.sampling.tokens_chat.TokensClient is unknown before its rollout",
    ),
    "prompts of a library": (
        {"sampler.max_prompt_len": 200, "env": VERIFIERS},
        "length of a prompt of envs.verifiers.environment.Verifiers is unknown before its rollout",
    ),
    "prompts of a library, in a mixture": (
        {"sampler.max_prompt_len": 200, "env": MIXTURE | {"envs": {"words": VERIFIERS}}},
        "length of a prompt of envs.verifiers.environment.Verifiers is unknown before its rollout",
    ),
    "row longer than the model": (
        {"max_seq_len": 512},
        "max_seq_len=512 exceeds model.max_seq_len=256: raise model.max_seq_len",
    ),
    **{
        f"{key} under ZeRO {stage}": (
            {"deepspeed": {"zero_optimization": {"stage": stage, key: {"device": "cpu"}}}},
            f"deepspeed.zero_optimization.{key}.device=cpu needs ZeRO stage 3, not ",
        )
        for key in ("offload_optimizer", "offload_param")
        for stage in (0, 1, 2)
    },
    "compiled layers under ZeRO 3": (
        {"trainer.compile": True, "deepspeed": ZERO[3]},
        "trainer.compile=true cannot compile layers in which ZeRO stage 3 gathers weights",
    ),
    "a rollout longer than a wait": (
        {"sampler.rollout_timeout": 700.0},
        "sampler.rollout_timeout=700.0 s is not below trainer.wait_timeout=600 s, so one slow",
    ),
    "a rollout as long as a wait": (
        {"sampler.rollout_timeout": 500.0, "trainer.wait_timeout": 500.0},
        "sampler.rollout_timeout=500.0 s is not below trainer.wait_timeout=500.0 s",
    ),
    "a rollout of one environment longer than all": (
        {"sampler.rollout_timeout": 60.0, "env": limited(rollout_timeout=61)},
        "env.sampling.words.rollout_timeout=61 exceeds sampler.rollout_timeout=60.0, the limit",
    ),
    "GPUs of this machine for others": (
        {"trainer.devices": [1], "cluster": chosen("cluster", "ray")},
        "trainer.devices=[1] names GPUs of this machine, but rl.cluster.ray_cluster.RayCluster",
    ),
    "GPUs of this machine for a vLLM elsewhere": (
        {"inference.devices": [0], "cluster": chosen("cluster", "ray")},
        "inference.devices=[0] names GPUs of this machine, but rl.cluster.ray_cluster.RayCluster",
    ),
    "no duration": ({"max_time": "3x"}, "max_time=3x is not a duration: write 3h30m, 90m, or a"),
    "no condition": (
        {"stop_when": "eval/reward = 1"},
        "stop_when=eval/reward = 1 is not a condition: write a metric of metrics.jsonl",
    ),
    "a condition on no evaluation": (
        {"stop_when": "eval/reward > 0.9"},
        "stop_when reads eval/reward, but the run has no evaluation: use evaluation=default",
    ),
    "a debugger for two ranks": (
        {"trainer.debug": True, "trainer.ranks": 2},
        "trainer.debug=true runs one rank in this terminal, but trainer.ranks=2: set trainer.ranks",
    ),
    "a debugger on another machine": (
        {"trainer.debug": True, "cluster": chosen("cluster", "ray")},
        "trainer.debug=true needs a trainer on this machine: use cluster=local",
    ),
    "no reward": (
        {"env.reward_weights": {"exact": 0.0}},
        "env.reward_weights={'exact': 0.0} makes every reward 0: raise one weight",
    ),
    "adapter sync with whole modules": (
        {**lora(modules_to_save=["norm"]), **SYNC_ADAPTER},
        "(adapter.modules_to_save=['norm']): set adapter.modules_to_save=[], or use sync=auto",
    ),
    "adapter sync without a base": (
        {**lora(), **SYNC_ADAPTER, "model.warm_start": None},
        "vLLM has no base model for an adapter: use a model with model.warm_start, or sync=auto",
    ),
}

ALLOWED: dict[str, Changes] = {
    "as shipped": {},
    "muon with whole matrices": {"optim": MUON, "deepspeed": ZERO[0]},
    "muon with DeepSpeed's default stage": {"optim": MUON, "deepspeed": {}},
    "adapter with whole modules, merged": lora(modules_to_save=["norm"]),
    "no reward, but less entropy": {"env.reward_weights": {"exact": 0.0}, "entropy_bonus": -1.0},
    "one of several rewards": {"env.reward_weights": {"exact": 0.0, "similarity": 1.0}},
    "a longest turn": {"sampler.max_tokens": 255},
    "the limits of one environment": {
        "sampler.rollout_timeout": 60.0,
        "env": limited(stop=["</a>"], max_tokens=255, rollout_timeout=60),
    },
    "GPUs of this machine": {"trainer.devices": [1], "inference.devices": [0]},
    "ZeRO 2 that offloads nothing, compiled": {
        "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
        "trainer.compile": True,
    },
    "no reward, but an entropy bonus at some steps": {
        "env.reward_weights": {"exact": 0.0},
        "entropy_bonus": {"_target_": "rl.schedule.linear", "start": 0.5, "end": 0.0, "steps": 9},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_senseless_value_is_refused_in_one_sentence(name: str, config: dict[str, Any]) -> None:
    changes, said = REFUSED[name]
    problem = only_problem(changed(config, changes))
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_a_value_that_makes_sense_is_allowed(name: str, config: dict[str, Any]) -> None:
    check(changed(config, ALLOWED[name]))


CORRECTED = {"updates_per_batch": 2, "correction": chosen("correction", "mis")}
PPO = {"critic": composed("loss=ppo")["critic"]}
OUT_OF_RANGE: list[tuple[str, Any, Changes]] = [
    ("seed", -1, {}),
    ("max_steps", 0, {}),
    ("batch_size", 0, {}),
    ("updates_per_batch", 0, {}),
    ("reward.length_penalty", -0.1, {}),
    ("sampler.temperature", 0.0, {}),
    ("sampler.top_p", 0.0, {}),
    ("sampler.top_p", 1.01, {}),
    ("optim.beta2", 1.0, {}),
    ("optim.momentum", 1.0, {"optim": MUON}),
    ("optim.adamw_ratio", 0.0, {"optim": MUON}),
    ("loss.clip_low", 5.0, {}),  # not below clip_high
    ("loss.ratio_low", 9.0, {"loss": chosen("loss", "masked_is")}),
    ("loss.dual_clip", 1.0, {"loss": chosen("loss", "ppo_clip")}),
    ("loss.mix", 0.0, {**teacher("a/b"), "loss": chosen("loss", "jsd_topk")}),
    ("adapter.rank", 0, lora()),
    ("adapter.alpha", 0.0, lora()),
    ("adapter.dropout", 1.0, lora()),
    ("truncation.limit", 0, {"truncation": chosen("truncation", "penalty")}),
    ("buffer.min_spread", -0.1, {"buffer": chosen("buffer", "difficulty")}),
    ("buffer.min_reward", 0.9, {"buffer": chosen("buffer", "difficulty") | {"max_reward": 0.9}}),
    ("order.hard_weight", -1.0, {"order": chosen("order", "difficulty")}),
    ("order.hard_threshold", 0.8, {"order": chosen("order", "difficulty")}),  # = easy_threshold
    ("kl.beta", -0.1, {}),
    ("kl.target_kl", 0.0, {"kl.beta": 0.01}),
    ("reference.refresh_every", -1, {}),
    ("reference.refresh_mix", 1.5, {}),
    ("reference.top_k", 0, teacher("a/b")),
    ("correction.low", -0.5, CORRECTED),
    ("correction.low", 2.0, CORRECTED),  # not below high
    ("critic.estimator.gamma", 1.1, PPO),
    ("critic.estimator.gae_lambda", -0.1, PPO),
    ("critic.loss.clip", 0.0, PPO),
    ("critic.head_start", -1, PPO),
    ("critic.optim.learning_rate", 0.0, PPO),
]


@pytest.mark.parametrize(("key", "value", "others"), OUT_OF_RANGE)
def test_a_value_out_of_its_range_is_refused_by_its_key(
    key: str, value: Any, others: Changes, config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(changed(changed(config, others), {key: value}))
    (problem,) = caught.value.problems
    assert problem.startswith(key)


def test_a_loss_that_compares_rollouts_needs_room_for_a_group_in_a_micro_batch(
    config: dict[str, Any], modules: Path
) -> None:
    (modules / "knobs_pairs.py").write_text("whole_groups = True\ndef mine(tokens): ...\n")
    sizes = {"group_size": 16, "max_seq_len": 100, "batch_size": 64}
    pairs = changed(config, {"loss": {"_target_": "knobs_pairs.mine"}, **sizes})
    check(changed(pairs, {"trainer.tokens_per_micro_batch": 1600}))
    small = {"trainer.tokens_per_micro_batch": 1599}
    with pytest.raises(ConfigError, match=r"set trainer\.tokens_per_micro_batch=1600, or lower"):
        check(changed(pairs, small))
    check(changed(config, {**sizes, **small}))
    grows = {"strategy": chosen("strategy", "adaptive_size")}
    said = "strategy.max_rounds=4 times group_size=16 rollouts .*tokens_per_micro_batch=6400, or"
    with pytest.raises(ConfigError, match=said):
        check(changed(pairs, {**grows, "trainer.tokens_per_micro_batch": 6399}))
    check(changed(pairs, {**grows, "trainer.tokens_per_micro_batch": 6400}))


def test_the_ends_of_a_range_are_allowed(config: dict[str, Any]) -> None:
    check(changed(config, {"sampler.top_p": 0.01, "reference.refresh_mix": 1.0}))
    check(changed(config, {"loss": {**chosen("loss", "ppo_clip"), "dual_clip": 1.01}}))


def test_an_evaluation_is_refused_by_name_where_the_sampler_has_no_temperature():
    config = composed("loss=sft", "sampler=demonstrations", "evaluation=default")
    assert only_problem(config).startswith("evaluation needs vLLM to sample answers")


def test_the_largest_rank_that_vllm_takes_is_taken():
    node = {"_target_": "rl.model.lora.LoRA", "modules_to_save": [], "rank": VLLM_RANKS[-1]}
    model = {"_target_": "rl.model.pretrained.PretrainedModel"}
    assert adapter_obstacle(node, model) is None
    assert "is too high" in (adapter_obstacle({**node, "rank": VLLM_RANKS[-1] + 1}, model) or "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.jsonl", "does not exist (relative paths start in "),
        ("folder", "is a folder: name a file in this folder"),
    ],
)
def test_a_data_set_that_cannot_be_read_is_refused(
    name: str, said: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    env = composed("env=composed", "env.dataset.path=x")["env"]
    problem = only_problem(changed(config, {"env": env, "env.dataset.path": str(tmp_path / name)}))
    assert problem.startswith(f"env.dataset.path={tmp_path / name}")
    assert said in problem
    (tmp_path / "some.jsonl").touch()
    there = {"env": env, "env.dataset.path": str(tmp_path / "*.jsonl")}
    check(changed(config, there))
    own = {"own": {"fn": {"_target_": "envs.rewards.exact_match"}, "weight": 0.5}, "gone": None}
    check(changed(config, {**there, "env.reward_weights": {"correct": 0.0}, "env.rewards": own}))


@pytest.mark.parametrize("choice", ["tiny-wiki", "tiny-words"])
def test_shipped_files_are_found_from_every_folder(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"tiny-wiki": "path", "tiny-words": "tokenizer"}[choice]
    monkeypatch.chdir(REPO)
    assert not os.path.isabs(composed(f"model={choice}")["model"][key])
    monkeypatch.chdir(tmp_path)
    config = composed("env=wiki-search", f"model={choice}", f"output_dir={tmp_path}")
    assert Path(config["model"][key]).exists()
    check(config)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("url", "https://me:hunter2@host/v1", "contains a password or key"),
        ("url", "http://:hunter2@host", "contains a password or key"),
        ("url", "HTTPS://hunter2@host:8000/v1", "contains a password or key"),
        ("url", "https://host/v1?a=b&api_key=hunter2", "contains a password or key"),
        ("base_url", "http://host?access-token=hunter2", "contains a password or key"),
        ("url", "http://host/?a&my_secret=hunter2", "contains a password or key"),
        ("url", " ftp://host?passwd=hunter2", "contains a password or key"),
        ("api_key_variable", "sk-hunter2", "does not name an environment variable"),
        ("api_key_variable", "AKIAhunter2EXAMPLE", "does not name an environment variable"),
        ("api_key_variable", "hf_hunter2", "does not name an environment variable"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(key: str, value: str, said: str) -> None:
    (problem,) = secret_problems({"env": {"judge": [{key: value}]}})
    assert problem.startswith(f"env.judge.0.{key} {said}")
    assert "hunter2" not in problem


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "mykey", None])
def test_a_name_of_a_variable_is_allowed_if_it_looks_like_one_or_is_set(name, monkeypatch):
    monkeypatch.setenv("mykey", "x")
    urls = {"url": "http://host:8000/v1?version=1", "text": "mail me@host: now", "n": 3}
    assert list(secret_problems({"client": {"api_key_variable": name, **urls}})) == []
