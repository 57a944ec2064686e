"""Check the sentences of rules.py and algorithm_rules.py about values, files, secrets and teachers.

tests/test_compositions.py checks the sentences about pairs of choices.
"""

from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.facts import sees_hint
from rl.config.limits import num_returned_tokens
from rl.config.rules import secret_problems
from rl.config.schema import ConfigError
from tests.support.composing import (
    Changes,
    check_all,
    chosen,
    composed,
    only_problem,
    with_choices,
)

MIXTURE = composed("env=mixture")["env"]
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
    "penalty": {"kl.beta": 0.01},
    "k1": {"kl.beta": 0.01, "kl.estimator": {"_target_": "losses.kl.k1"}, "kl.place": "reward"},
    "critic_muon": {"critic.optim": MUON},
    "model": {"reference": MODEL},
    "endpoint": {"reference": ENDPOINT},
    "hinted": {"reference": HINTED},
    "both": BOTH,
    "mixture": {"env": ONE_OF_MIXTURE},
    "mixed_verifiers": {"env.envs.words": VERIFIERS},
}
# The message, and changes of the shipped configuration ("=name" is conf/<key>/<name>.yaml).
REFUSED: dict[str, Changes] = yaml.safe_load("""
"use batch_size=240 or 256, or another group_size": {batch_size: 250}
"use batch_size=16, or another group_size": {batch_size: 8}
"where vLLM does not look for sampler.stop=['</a>']: set sampler.stop=[], or use another strategy":
  {strategy: =branch, sampler.stop: [</a>]}
"model.head_dtype=float32 and inference.args.hf_overrides exclude each other":
  {model.head_dtype: float32, inference.args: {hf-overrides: "{}"}}
"env.sampling.words.max_tokens=256 leaves no room for the prompt in max_seq_len=256":
  {with: mixture, env.sampling.words.max_tokens: 256}
"length of a prompt of rl.sampling.tokens_chat.TokensClient is unknown before its rollout":
  {sampler.max_prompt_len: 200, client: =tokens}
"of envs.verifiers.environment.Verifiers is unknown before its rollout":
  {with: mixture mixed_verifiers, sampler.max_prompt_len: 200}
"max_seq_len=512 exceeds model.max_seq_len=256: raise model.max_seq_len": {max_seq_len: 512}
"trainer.compile=true cannot compile layers in which ZeRO stage 3 gathers weights":
  {trainer.compile: true, deepspeed: =zero3}
"sampler.rollout_timeout=500.0 s is not below trainer.wait_timeout=500.0 s":
  {sampler.rollout_timeout: 500.0, trainer.wait_timeout: 500.0}
"env.sampling.words.rollout_timeout=61 exceeds sampler.rollout_timeout=60.0, the limit":
  {with: mixture, sampler.rollout_timeout: 60.0, env.sampling.words.rollout_timeout: 61}
"trainer.devices=[1] names GPUs of this machine, but rl.cluster.ray_cluster.RayCluster":
  {trainer.devices: [1], cluster: =ray}
"max_time=3x is not a duration: write 3h30m, 90m, or a": {max_time: 3x}
"stop_when=eval/reward = 1 is not a condition: write a metric of": {stop_when: eval/reward = 1}
"stop_when reads eval/reward, but the run has no evaluation: use evaluation=default":
  {stop_when: eval/reward > 0.9}
"trainer.debug=true needs a trainer on this machine: use cluster=local":
  {trainer.debug: true, cluster: =ray}
"env.reward_weights={'exact': 0.0} makes every reward 0: raise one weight":
  {env.reward_weights: {exact: 0.0}}
"sampler.max_staleness=4 versions old in its first batch: use buffer.max_staleness=12":
  {with: replay, buffer.max_staleness: 4, sampler.max_staleness: 4}
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
"reference=endpoint returns logprobs at temperature 1, but sampler.temperature={":
  {with: endpoint, loss: =distill,
   sampler.temperature: {_target_: rl.schedule.linear, start: 1.0, end: 0.6, steps: 9}}
"critic.head_start=20 leaves no steps of max_steps=20 for the policy: set":
  {with: ppo, critic.head_start: 20, max_steps: 20}
"is biased: add sampler.top_k=128 or less, or accept the bias with":
  {with: model, loss: =distill, sampler.top_p: 0.9}
"with sampler.presence_penalty=0.5 vLLM does not sample the policy's distribution":
  {sampler.top_k: 128, sampler.presence_penalty: 0.5}
"flattened pieces of them: use deepspeed=zero0, or optim@critic.optim=adamw":
  {with: ppo critic_muon, deepspeed: =zero2}
"zero_optimization.offload_optimizer.device=cpu needs ZeRO stage 3, not 2":
  {deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}}
"zero_optimization.offload_param.device=cpu needs ZeRO stage 3, not 2":
  {deepspeed: {zero_optimization: {stage: 2, offload_param: {device: cpu}}}}
""") | {
    "env.envs.arithmetic.reward_weights={'correct': 0} makes every reward 0": {
        "env": MIXTURE,
        "env.envs.arithmetic.reward_weights": {"correct": 0},
    },
    "reference.teachers has no teacher for arithmetic of env.envs: add "
    "+reference@reference.teachers.arithmetic=model "
    "reference.teachers.arithmetic.path=<its teacher>": several(reverse=MODEL),
    "reference.teachers.arithmetic.top_k=4 and reference.teachers.reverse-text.top_k=16 "
    "differ, but the loss needs the same number of candidate tokens from each teacher": several(
        "forward_kl_topk", reverse=MODEL, arithmetic={**MODEL, "top_k": 4}
    ),
    "reference.teachers.arithmetic is rl.learner.reference.protocol.NoReference, which": several(
        reverse=MODEL, arithmetic=chosen("reference", "none")
    ),
}
ALLOWED: dict[str, Changes] = yaml.safe_load("""
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
k1 without weight: {with: k1, kl.place: loss, kl.beta: 0.0}
one demonstration for each example: {with: sft, group_size: 1}
candidates of truncated sampling: {with: model, loss: =reverse_kl_topk, sampler.top_p: 0.9}
limits of sampling that top_k bounds: {sampler.top_k: 128, sampler.top_p: 0.9, sampler.min_p: 0.1}
a teacher with hints: {with: model, loss: =distill, reference.sees_hint: true}
the policy with hints: {with: hinted, loss: =reverse_kl_topk}
penalties of separate rewards:
  {advantage: =max_rl, truncation: =penalty, truncation.limit: 8, reward.normalise_each: true,
   reward.length_penalty: 0.1}
a critic and a penalty in the reward: {with: ppo k1}
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("seed", -1), ("max_steps", 0), ("batch_size", 0), ("updates_per_batch", 0)],
        *[("sampler.temperature", 0.0), ("sampler.top_p", 0.0), ("sampler.top_p", 1.01)],
        *[("kl.beta", -0.1), ("optim.beta2", 1.0), ("reference.refresh_mix", 1.5)],
        *[("reward.length_penalty", -0.1), ("loss.clip_low", 5.0)],  # not below clip_high
        *[("adapter.dropout", 1.0), ("adapter.rank", 0), ("critic.estimator.gamma", 1.1)],
        *[("critic.loss.clip", 0.0), ("critic.head_start", -1)],
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_key(key, value, config):
    row = {"with": "ppo"} if key.startswith("critic") else {}
    row |= {"adapter": "=lora"} if key.startswith("adapter") else {}
    assert only_problem(given(config, {**row, key: value})).startswith(key)


def test_a_loss_that_compares_rollouts_needs_room_for_a_group_in_a_micro_batch(config, modules):
    (modules / "knobs_pairs.py").write_text("whole_groups = True\ndef mine(tokens): ...\n")
    sizes = {"group_size": 16, "max_seq_len": 100, "batch_size": 64}
    pairs = with_choices(config, {"loss": {"_target_": "knobs_pairs.mine"}, **sizes})
    grown = with_choices(pairs, {"strategy": "=adaptive_size"})
    times = "strategy.max_rounds=4 times group_size=16 rollouts .*tokens_per_micro_batch=6400, or"
    for made, limit, said in ((pairs, 1600, "_micro_batch=1600, or lower"), (grown, 6400, times)):
        check(with_choices(made, {"trainer.tokens_per_micro_batch": limit}))
        with pytest.raises(ConfigError, match=said):
            check(with_choices(made, {"trainer.tokens_per_micro_batch": limit - 1}))


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


def test_a_secret_is_refused_and_not_repeated(monkeypatch):
    urls = (
        *("HTTPS://me:hunter2@host/v1", "https://host/v1?a=b&api_key=hunter2"),
        *("http://host?access-token=hunter2", "http://host/?a&my_secret=hunter2"),
        " ftp://host?passwd=hunter2",
    )
    said = {("url", url): "contains a password or key" for url in urls}
    for key in ("sk-hunter2", "AKIAhunter2EXAMPLE"):
        said["api_key_variable", key] = "does not name an environment variable"
    for (key, value), reason in said.items():
        (problem,) = secret_problems({"env": {"judge": [{key: value}]}})
        assert problem.startswith(f"env.judge.0.{key} {reason}")
        assert "hunter2" not in problem
    monkeypatch.setenv("mykey", "x")
    urls = {"url": "http://host:8000/v1?version=1", "text": "mail me@host: now", "n": 3}
    for name in ("OPENAI_API_KEY", "mykey", None):  # it looks like a variable, or is one
        assert list(secret_problems({"client": {"api_key_variable": name, **urls}})) == []


REMOVE, ADD = "remove the option", "add sampler.top_k=128 or less"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [("top_p", 0.9, ADD), ("top_k", 129, ADD), ("min_p", 0.1, ADD),
     ("repetition_penalty", 1.1, REMOVE), ("presence_penalty", 0.5, REMOVE),
     ("frequency_penalty", -0.5, REMOVE)],
)  # fmt: skip
def test_learning_from_another_distribution_must_be_accepted(key, value, remedy, config):
    given = with_choices(config, {f"sampler.{key}": value})
    assert only_problem(given) == (
        f"with sampler.{key}={value} vLLM does not sample the policy's distribution, so "
        f"losses.cispo.cispo is biased: {remedy}, or accept the bias with "
        "sampler.allow_biased_ratio=true"
    )
    check_all(with_choices(given, {"sampler.allow_biased_ratio": True}))


def test_vllm_returns_twice_top_k_tokens_and_at_least_twenty():
    numbers = {1: 20, 10: 20, 11: 22, 128: 256, 129: 0, 0: 0, -1: 0}
    assert {k: num_returned_tokens({"top_k": k, "top_p": 0.9}) for k in numbers} == numbers
    for other in ({"allow_biased_ratio": True}, {"repetition_penalty": 1.1}):
        assert num_returned_tokens({"top_k": 8, **other}) == 0


def test_hints_are_seen_by_environment_and_only_where_something_reads_them(config):
    mixed = given(config, ALLOWED["hints for one of them"])
    assert [sees_hint(mixed, name) for name in ("reverse-text", "arithmetic")] == [True, False]
    assert sees_hint(given(config, ALLOWED["a teacher with hints"]), "any name")
    assert not sees_hint(config, "arithmetic")
