"""Check the sentences of rules.py and algorithm_rules.py about values, files, secrets and teachers.

tests/test_compositions.py checks the sentences about pairs of choices.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.facts import sees_hint
from rl.config.learned import Learned
from rl.config.limits import num_returned_tokens
from rl.config.reference_rules import each_reference_problems
from rl.config.rules import secret_problems
from rl.config.schedules import split_schedules
from rl.config.schema import ConfigError
from rl.config.transport import VLLM_RANKS, adapter_obstacle
from tests.support.composing import (
    REPO,
    Changes,
    check_all,
    chosen,
    composed,
    learned,
    only_problem,
    with_choices,
)

MIXTURE = composed("env=mixture")["env"]
SFT_AND_RL = composed("loss=sft_and_rl")
MUON = {**chosen("optim", "muon"), "learning_rate": 1e-3}
MODEL = {**chosen("reference", "model"), "path": "some/teacher", "dtype": "bfloat16"}
ENDPOINT = {**chosen("reference", "endpoint"), "url": "http://there/v1", "model": "t"}
INITIAL = chosen("reference", "initial")
VERIFIERS = {**chosen("env", "verifiers"), "id": "x"}
HINTED = {**INITIAL, "sees_hint": True}
ONE_OF_MIXTURE = {
    "_target_": "envs.mixture.Mixture", "weights": {"words": 1.0}, "sampling": {"words": {}},
    "envs": {"words": chosen("env", "reverse-text")},
}  # fmt: skip


def several(loss: str = "distill", **teachers: Any) -> Changes:
    """Return a mixture of reverse-text and arithmetic; `reverse` means the former."""
    names = {"reverse": "reverse-text"}
    node = chosen("reference", "per_env")
    node["teachers"] = {names.get(name, name): teacher for name, teacher in teachers.items()}
    return {"loss": f"={loss}", "env": MIXTURE, "reference": node}


BOTH = several(reverse=MODEL, arithmetic=ENDPOINT)
# Changes that the tables below refer to in `with`.
SETS: dict[str, Changes] = {
    "sft": {"loss": "=sft", "sampler": "=demonstrations", "advantage": "=none"},
    "ppo": {"loss": "=ppo_clip", "advantage": "=none", "critic": composed("loss=ppo")["critic"]},
    "replay": {"buffer": composed("buffer=replay")["buffer"]},
    "sft_and_rl": {name: SFT_AND_RL[name] for name in ("buffer", "loss")},
    "penalty": {"kl.beta": 0.01},
    "k1": {"kl.beta": 0.01, "kl.estimator": {"_target_": "losses.kl.k1"}, "kl.place": "reward"},
    "muon": {"optim": MUON},
    "critic_muon": {"critic.optim": MUON},
    "model": {"reference": MODEL},
    "endpoint": {"reference": ENDPOINT},
    "hinted": {"reference": HINTED},
    "both": BOTH,
    "both_teachers": {key: node for key, node in BOTH.items() if key != "loss"},
    "verifiers": {"env": VERIFIERS},
    "mixed_verifiers": {"env.envs.words": VERIFIERS},
    "mixture": {"env": ONE_OF_MIXTURE},
}
# The message, and changes of the shipped configuration ("=name" is conf/<key>/<name>.yaml).
REFUSED: dict[str, Changes] = yaml.safe_load("""
"use batch_size=240 or 256, or another group_size": {batch_size: 250}
"use batch_size=16, or another group_size": {batch_size: 8}
"rl.sampling.demonstrations.DemonstrationSampler starts no vLLM: use strategy=independent":
  {with: sft, strategy: =extremes}
"where vLLM does not look for sampler.stop=['</a>']: set sampler.stop=[], or use another strategy":
  {strategy: =branch, sampler.stop: [</a>]}
"look for env.sampling.words.stop=['</a>']: set env.sampling.words.stop=[], or use another":
  {with: mixture, strategy: =branch, env.sampling.words.stop: [</a>]}
"model.head_dtype=float32 and inference.args.hf_overrides exclude each other":
  {model.head_dtype: float32, inference.args: {hf-overrides: "{}"}}
"sampler.max_tokens=256 leaves no room for the prompt in max_seq_len=256": {sampler.max_tokens: 256}
"env.sampling.words.max_tokens=256 leaves no room for the prompt in max_seq_len=256":
  {with: mixture, env.sampling.words.max_tokens: 256}
"length of a prompt of rl.sampling.tokens_chat.TokensClient is unknown before its rollout":
  {sampler.max_prompt_len: 200, client: =tokens}
"prompt of envs.verifiers.environment.Verifiers is unknown before its rollout":
  {with: verifiers, sampler.max_prompt_len: 200}
"of envs.verifiers.environment.Verifiers is unknown before its rollout":
  {with: mixture mixed_verifiers, sampler.max_prompt_len: 200}
"max_seq_len=512 exceeds model.max_seq_len=256: raise model.max_seq_len": {max_seq_len: 512}
"trainer.compile=true cannot compile layers in which ZeRO stage 3 gathers weights":
  {trainer.compile: true, deepspeed: =zero3}
"sampler.rollout_timeout=700.0 s is not below trainer.wait_timeout=600 s, so one slow":
  {sampler.rollout_timeout: 700.0}
"sampler.rollout_timeout=500.0 s is not below trainer.wait_timeout=500.0 s":
  {sampler.rollout_timeout: 500.0, trainer.wait_timeout: 500.0}
"env.sampling.words.rollout_timeout=61 exceeds sampler.rollout_timeout=60.0, the limit":
  {with: mixture, sampler.rollout_timeout: 60.0, env.sampling.words.rollout_timeout: 61}
"trainer.devices=[1] names GPUs of this machine, but rl.cluster.ray_cluster.RayCluster":
  {trainer.devices: [1], cluster: =ray}
"inference.devices=[0] names GPUs of this machine, but rl.cluster.ray_cluster.RayCluster":
  {inference.devices: [0], cluster: =ray}
"max_time=3x is not a duration: write 3h30m, 90m, or a": {max_time: 3x}
"stop_when=eval/reward = 1 is not a condition: write a metric of": {stop_when: eval/reward = 1}
"stop_when reads eval/reward, but the run has no evaluation: use evaluation=default":
  {stop_when: eval/reward > 0.9}
"trainer.debug=true needs a trainer on this machine: use cluster=local":
  {trainer.debug: true, cluster: =ray}
"env.reward_weights={'exact': 0.0} makes every reward 0: raise one weight":
  {env.reward_weights: {exact: 0.0}}
"(adapter.modules_to_save=['norm']): set adapter.modules_to_save=[], or use sync=auto":
  {adapter: =lora, adapter.modules_to_save: [norm], sync: =adapter}
"vLLM has no base model for an adapter: use a model with model.warm_start, or sync=auto":
  {adapter: =lora, model.warm_start: null, sync: =adapter}
"replaces the advantages of rl.rollouts.batch_credit.whiten: use batch_credit=none, or":
  {with: ppo, batch_credit: =whiten}
"but losses.cross_entropy.cross_entropy reads none: use batch_credit=none":
  {with: sft, batch_credit: =whiten}
"sampler.max_staleness=4 versions old in its first batch: use buffer.max_staleness=12":
  {with: replay, buffer.max_staleness: 4, sampler.max_staleness: 4}
"but buffer.replay_share=0.25 adds rollouts of earlier policies: use loss=cispo":
  {with: replay, loss: =reinforce}
"adds text that no policy sampled: use loss=sft_and_rl, or buffer=fifo":
  {with: sft_and_rl, loss: =cispo}
"demonstrations of buffer.demonstration_share=0.25 lack: use correction=none":
  {with: sft_and_rl, updates_per_batch: 2, correction: =tis_token}
"leave no new groups in a batch of 1 groups: lower them, or raise batch_size":
  {with: replay, batch_size: 32, group_size: 32}
"a KL penalty uses rl.learner.reference.local.InitialPolicy: set kl.beta=0.01":
  {reference.refresh_every: 10}
"nor a KL penalty uses rl.learner.reference.local.InitialPolicy: set kl.beta=0.01": {with: hinted}
"an adapter freezes: set reference.refresh_every=0, or use adapter=none":
  {with: penalty, reference.refresh_every: 10, adapter: =lora}
"sampler.top_k=20 the trainer needs them over the tokens that vLLM kept: use reference=model, or":
  {with: endpoint, loss: =distill, sampler.top_k: 20}
"the mean of its gradient is zero: use kl.place=reward, or kl=k3": {with: k1, kl.place: loss}
"kl.place=reward with losses.kl.k3 has a biased gradient: use kl=k1":
  {with: penalty, kl.place: reward}
"rl.sampling.demonstrations.DemonstrationSampler samples none: set reference.sees_hint=":
  {with: sft model, loss: =forward_kl_topk, reference.sees_hint: true}
"env is a single environment: use reference=model, or env=mixture": {with: both, env: =arithmetic}
"reference.teachers.arithmetic=endpoint returns logprobs at temperature 1, but sampler.temp":
  {with: both, sampler.temperature: 0.7}
"critic.head_start=20 leaves no steps of max_steps=20 for the policy: set":
  {with: ppo, critic.head_start: 20, max_steps: 20}
"flattened pieces of them: use deepspeed=zero0, or optim@critic.optim=adamw":
  {with: ppo critic_muon, deepspeed: =zero2}
""") | {
    **{
        f"zero_optimization.{key}.device=cpu needs ZeRO stage 3, not {stage}": {
            "deepspeed": {"zero_optimization": {"stage": stage, key: {"device": "cpu"}}}
        }
        for key in ("offload_optimizer", "offload_param")
        for stage in (0, 1, 2)
    },
    "reference.teachers has no teacher for arithmetic of env.envs: add "
    "+reference@reference.teachers.arithmetic=model "
    "reference.teachers.arithmetic.path=<its teacher>": several(reverse=MODEL),
    "no teacher for reverse-text and for arithmetic of env.envs": several(),
    "reference.teachers.arithmetics is not an environment of env.envs: did you": several(
        reverse=MODEL, arithmetic=MODEL, arithmetics=MODEL
    ),
    "reference.teachers.arithmetic.top_k=4 and reference.teachers.reverse-text.top_k=16 "
    "differ, but the loss needs the same number of candidate tokens from each teacher": several(
        "forward_kl_topk", reverse=MODEL, arithmetic={**MODEL, "top_k": 4}
    ),
    "reference.teachers.arithmetic=initial is the policy before training": several(
        reverse=MODEL, arithmetic=INITIAL
    ),
    "reference.teachers.arithmetic is rl.learner.reference.protocol.NoReference, which": several(
        reverse=MODEL, arithmetic=chosen("reference", "none")
    ),
}
ALLOWED: dict[str, Changes] = yaml.safe_load("""
as shipped: {}
muon with whole matrices: {with: muon, deepspeed: =zero0}
muon with DeepSpeed's default stage: {with: muon, deepspeed: {}}
adapter with whole modules, merged: {adapter: =lora, adapter.modules_to_save: [norm]}
no reward, but less entropy: {env.reward_weights: {exact: 0.0}, entropy_bonus: -1.0}
no reward, but an entropy bonus at some steps:
  {env.reward_weights: {exact: 0.0},
   entropy_bonus: {_target_: rl.schedule.linear, start: 0.5, end: 0.0, steps: 9}}
one of several rewards: {env.reward_weights: {exact: 0.0, similarity: 1.0}}
the limits of one environment:
  {with: mixture, sampler.rollout_timeout: 60.0,
   env.sampling.words: {stop: [</a>], max_tokens: 255, rollout_timeout: 60}}
GPUs of this machine: {trainer.devices: [1], inference.devices: [0]}
ZeRO 2 that offloads nothing, compiled:
  {deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: none}}},
   trainer.compile: true}
the ends of ranges: {sampler.top_p: 0.01, sampler.allow_biased_ratio: true}
a dual clip above 1: {loss: =ppo_clip, loss.dual_clip: 1.01}
a refreshed reference: {with: penalty, reference.refresh_every: 10, reference.refresh_mix: 1.0}
a teacher at another temperature: {with: model, loss: =distill, sampler.temperature: 0.7}
a steered penalty: {with: penalty, kl.target_kl: 0.1}
k1 without weight: {with: k1, kl.place: loss, kl.beta: 0.0}
several updates of demonstrations: {with: sft, updates_per_batch: 2}
demonstrations near the initial policy: {with: sft penalty}
one demonstration for each example: {with: sft, group_size: 1}
candidates in several updates: {with: model, loss: =reverse_kl_topk, updates_per_batch: 2}
candidates of truncated sampling: {with: model, loss: =reverse_kl_topk, sampler.top_p: 0.9}
candidates of a server: {with: endpoint, loss: =forward_kl_topk}
a teacher with hints: {with: model, loss: =distill, reference.sees_hint: true}
the policy with hints: {with: hinted, loss: =reverse_kl_topk}
a teacher for each: {with: both}
a divergence for each: {with: penalty both_teachers}
penalties of separate rewards:
  {advantage: =max_rl, truncation: =penalty, truncation.limit: 8, reward.normalise_each: true,
   reward.length_penalty: 0.1}
a critic of turns: {with: ppo, critic.over: turns, critic.loss.clip: 0.2, updates_per_batch: 4}
a critic and a penalty in the reward: {with: ppo k1}
a critic with an optimizer of its own: {with: ppo critic_muon}
""") | {
    "hints for one of them": several(reverse=HINTED, arithmetic=MODEL),
    "unread numbers differ": several(reverse=MODEL, arithmetic={**MODEL, "top_k": 4}),
}


def given(config: dict[str, Any], row: Changes) -> dict[str, Any]:
    """Return the configuration with the changes of a row of a table."""
    changes = {key: value for key, value in row.items() if key != "with"}
    for name in reversed(row.get("with", "").split()):
        changes = {**SETS[name], **changes}
    return with_choices(config, changes)


@pytest.mark.parametrize("said", REFUSED)
def test_what_makes_no_sense_is_refused_in_one_sentence(said, config):
    problem = only_problem(given(config, REFUSED[said]))
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_what_makes_sense_is_allowed(name, config):
    check_all(given(config, ALLOWED[name]))


# Changes of the shipped configuration, and values out of their ranges.
OUT_OF_RANGE = yaml.safe_load("""
- [{}, {seed: -1, max_steps: 0, batch_size: 0, updates_per_batch: 0, reward.length_penalty: -0.1}]
- [{}, {sampler.temperature: 0.0, sampler.top_p: 0.0, kl.beta: -0.1, optim.beta2: 1.0}]
- [{}, {sampler.top_p: 1.01, reference.refresh_every: -1, reference.refresh_mix: 1.5}]
- [{}, {loss.clip_low: 5.0}] # not below clip_high
- [{with: muon}, {optim.momentum: 1.0, optim.adamw_ratio: 0.0}]
- [{loss: =masked_is}, {loss.ratio_low: 9.0}]
- [{loss: =ppo_clip}, {loss.dual_clip: 1.0}]
- [{with: model, loss: =jsd_topk}, {loss.mix: 0.0, reference.top_k: 0}]
- [{adapter: =lora}, {adapter.rank: 0, adapter.alpha: 0.0, adapter.dropout: 1.0}]
- [{truncation: =penalty}, {truncation.limit: 0}]
- [{buffer: =difficulty}, {buffer.min_spread: -0.1}]
- [{buffer: =difficulty, buffer.max_reward: 0.9}, {buffer.min_reward: 0.9}]
- [{order: =difficulty}, {order.hard_weight: -1.0, order.hard_threshold: 0.8}] # = easy_threshold
- [{with: penalty}, {kl.target_kl: 0.0}]
- [{updates_per_batch: 2, correction: =mis}, {correction.low: -0.5}]
- [{updates_per_batch: 2, correction: =mis}, {correction.low: 2.0}] # not below high
- [{with: ppo}, {critic.estimator.gamma: 1.1, critic.estimator.gae_lambda: -0.1}]
- [{with: ppo}, {critic.loss.clip: 0.0, critic.head_start: -1, critic.optim.learning_rate: 0.0}]
""")


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [(*pair, others) for others, values in OUT_OF_RANGE for pair in values.items()],
)
def test_a_value_out_of_its_range_is_refused_by_its_key(key, value, others, config):
    assert only_problem(given(config, {**others, key: value})).startswith(key)


def test_a_loss_that_compares_rollouts_needs_room_for_a_group_in_a_micro_batch(config, modules):
    (modules / "knobs_pairs.py").write_text("whole_groups = True\ndef mine(tokens): ...\n")
    sizes = {"group_size": 16, "max_seq_len": 100, "batch_size": 64}
    pairs = {"loss": {"_target_": "knobs_pairs.mine"}, **sizes}
    grown = {**pairs, "strategy": "=adaptive_size"}
    said = "strategy.max_rounds=4 times group_size=16 rollouts .*tokens_per_micro_batch=6400, or"
    for changes, limit, refusal in (
        (pairs, 1599, r"set trainer\.tokens_per_micro_batch=1600, or lower"),
        (grown, 6399, said),
    ):
        check(with_choices(config, {**changes, "trainer.tokens_per_micro_batch": limit + 1}))
        with pytest.raises(ConfigError, match=refusal):
            check(with_choices(config, {**changes, "trainer.tokens_per_micro_batch": limit}))
    check(with_choices(config, {**sizes, "trainer.tokens_per_micro_batch": 1599}))


def test_an_evaluation_is_refused_by_name_where_the_sampler_has_no_temperature():
    config = composed("loss=sft", "sampler=demonstrations", "evaluation=default")
    assert only_problem(config).startswith("evaluation needs vLLM to sample answers")


def test_the_largest_rank_that_vllm_takes_is_taken():
    node = {"_target_": "rl.model.lora.LoRA", "modules_to_save": [], "rank": VLLM_RANKS[-1]}
    model = {"_target_": "rl.model.pretrained.PretrainedModel"}
    assert adapter_obstacle(node, model) is None
    assert "is too high" in (adapter_obstacle({**node, "rank": VLLM_RANKS[-1] + 1}, model) or "")


def test_a_data_set_that_cannot_be_read_is_refused(config, tmp_path):
    (tmp_path / "folder").mkdir()
    env = {"env": composed("env=composed", "env.dataset.path=x")["env"]}
    for name, said in (
        ("nothing.jsonl", "does not exist (relative paths start in "),
        ("folder", "is a folder: name a file in this folder"),
    ):
        path = str(tmp_path / name)
        problem = only_problem(with_choices(config, {**env, "env.dataset.path": path}))
        assert problem.startswith(f"env.dataset.path={path} {said}")
    (tmp_path / "some.jsonl").touch()
    there = {**env, "env.dataset.path": str(tmp_path / "*.jsonl")}
    check(with_choices(config, there))
    own = {"own": {"fn": {"_target_": "envs.rewards.exact_match"}, "weight": 0.5}, "gone": None}
    weights = {"env.reward_weights": {"correct": 0.0}, "env.rewards": own}
    check(with_choices(config, {**there, **weights}))


@pytest.mark.parametrize(("choice", "key"), [("tiny-wiki", "path"), ("tiny-words", "tokenizer")])
def test_shipped_files_are_found_from_every_folder(choice, key, tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    assert not os.path.isabs(composed(f"model={choice}")["model"][key])
    monkeypatch.chdir(tmp_path)
    config = composed("env=wiki-search", f"model={choice}", f"output_dir={tmp_path}")
    assert Path(config["model"][key]).exists()
    check(config)


def test_a_secret_is_refused_and_not_repeated():
    urls = (
        *("https://me:hunter2@host/v1", "http://:hunter2@host", "HTTPS://hunter2@host:8000/v1"),
        *("https://host/v1?a=b&api_key=hunter2", "http://host?access-token=hunter2"),
        *("http://host/?a&my_secret=hunter2", " ftp://host?passwd=hunter2"),
    )
    said = {("url", url): "contains a password or key" for url in urls}
    for key in ("sk-hunter2", "AKIAhunter2EXAMPLE", "hf_hunter2"):
        said["api_key_variable", key] = "does not name an environment variable"
    for (key, value), reason in said.items():
        (problem,) = secret_problems({"env": {"judge": [{key: value}]}})
        assert problem.startswith(f"env.judge.0.{key} {reason}")
        assert "hunter2" not in problem


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "mykey", None])
def test_a_name_of_a_variable_is_allowed_if_it_looks_like_one_or_is_set(name, monkeypatch):
    monkeypatch.setenv("mykey", "x")
    urls = {"url": "http://host:8000/v1?version=1", "text": "mail me@host: now", "n": 3}
    assert list(secret_problems({"client": {"api_key_variable": name, **urls}})) == []


LOSSES = (
    *("cispo", "ppo_clip", "grpo", "gspo", "masked_is", "dppo", "sapo"),  # they take ratios
    *("rloo", "reinforce", "distill"),  # they assume that the policy sampled its tokens
)
SAMPLING = {"top_k": 129, "min_p": 0.1, "repetition_penalty": 1.1}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": -0.5}


def sampled_for(loss: str, **limits: float) -> Changes:
    changes = {"loss": f"={loss}", "aggregation": "=sequence_mean"}
    changes |= {f"sampler.{key}": value for key, value in limits.items()}
    return {**changes, "reference": MODEL} if loss == "distill" else changes


@pytest.mark.parametrize(
    ("loss", "key", "value"),
    [
        *((loss, "top_p", 0.9) for loss in LOSSES),
        *(("cispo", *pair) for pair in (SAMPLING | PENALTIES).items()),
    ],
)
def test_learning_from_another_distribution_must_be_accepted(loss, key, value, config):
    changes = sampled_for(loss, **{key: value})
    problem = only_problem(with_choices(config, changes))
    assert problem.startswith(f"with sampler.{key}={value} vLLM does not sample the policy's")
    assert f"so {chosen('loss', loss)['_target_']} is biased: " in problem
    assert problem.endswith("accept the bias with sampler.allow_biased_ratio=true")
    check_all(with_choices(config, {**changes, "sampler.allow_biased_ratio": True}))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_k": 128, "top_p": 0.9, "min_p": 0.1}])
def test_limits_are_exact_if_top_k_bounds_them(loss, limits, config):
    changes = sampled_for(loss, **limits)
    check_all(with_choices(config, changes))
    problem = only_problem(with_choices(config, {**changes, "sampler.presence_penalty": 0.5}))
    assert problem.startswith("with sampler.presence_penalty=0.5 vLLM does not sample")
    assert "remove the option" in problem


def test_a_limit_without_top_k_says_how_it_becomes_exact(config):
    problem = only_problem(with_choices(config, {"sampler.top_p": 0.9, "sampler.min_p": 0.1}))
    assert problem.startswith("with sampler.top_p=0.9 and sampler.min_p=0.1 vLLM does not sample")
    assert "is biased: add sampler.top_k=128 or less, or accept the bias" in problem


def test_vllm_returns_twice_top_k_tokens_and_at_least_twenty():
    numbers = {1: 20, 10: 20, 11: 22, 128: 256, 129: 0, 0: 0, -1: 0}
    assert {k: num_returned_tokens({"top_k": k, "top_p": 0.9}) for k in numbers} == numbers
    for other in ({"allow_biased_ratio": True}, {"repetition_penalty": 1.1}):
        assert num_returned_tokens({"top_k": 8, **other}) == 0


def test_an_endpoint_needs_temperature_1_at_each_step(config):
    cooler = {"_target_": "rl.schedule.linear", "start": 1.0, "end": 0.6, "steps": 9}
    changes = {"loss": "=distill", "reference": ENDPOINT, "sampler.temperature": cooler}
    facts = Learned(**learned(loss_reads=["ref_logprobs"]))
    given = split_schedules(with_choices(config, changes))
    (problem,) = each_reference_problems(given, facts)
    assert problem.startswith("reference=endpoint returns logprobs at temperature 1, but sampler.")


def test_hints_are_seen_by_environment_and_only_where_something_reads_them(config):
    mixed = given(config, ALLOWED["hints for one of them"])
    assert sees_hint(mixed, "reverse-text")
    assert not sees_hint(mixed, "arithmetic")
    assert sees_hint(given(config, ALLOWED["a teacher with hints"]), "any name")
    assert not sees_hint(config, "arithmetic")


def test_teachers_may_be_named_on_the_command_line(tmp_path):
    teachers = "reference.teachers"
    config = composed(
        *("loss=distill", "env=mixture", "reference=per_env", f"output_dir={tmp_path}"),
        *(
            f"+reference@{teachers}.reverse-text=model",
            f"{teachers}.reverse-text.path=some/teacher",
        ),
        *(f"+reference@{teachers}.arithmetic=endpoint", f"{teachers}.arithmetic.model=t"),
        f"{teachers}.arithmetic.url=http://there/v1",
    )
    check_all(config)
    targets = [node["_target_"] for node in config["reference"]["teachers"].values()]
    assert [target.rpartition(".")[2] for target in targets] == ["FrozenModel", "Endpoint"]


def test_ppo_brings_its_critic_and_the_command_line_wins(tmp_path):
    ppo = composed("loss=ppo", f"output_dir={tmp_path}", "critic.optim.learning_rate=0.5")
    assert ppo["critic"]["optim"]["learning_rate"] == 0.5
    assert ppo["optim"]["learning_rate"] != 0.5
    muon = composed("loss=ppo", f"output_dir={tmp_path}", "optim@critic.optim=muon")
    assert muon["critic"]["optim"]["_target_"] == "rl.learner.optim.Muon"
    assert muon["optim"]["_target_"] == "rl.learner.optim.AdamW"
    none = composed("loss=ppo", "critic=none", f"output_dir={tmp_path}")
    assert none["critic"] == chosen("critic", "none")
