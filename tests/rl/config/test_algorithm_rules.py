"""Check the sentences of algorithm_rules.py about values, references and the critic.

tests/test_compositions.py checks the sentences about pairs of choices.
"""

from pathlib import Path
from typing import Any

import pytest

from rl.config.facts import sees_hint
from rl.config.learned import Learned
from rl.config.limits import num_returned_tokens
from rl.config.reference_rules import each_reference_problems
from rl.config.schedules import split_schedules
from rl.config.schema import ConfigError
from tests.support.composing import (
    Changes,
    changed,
    check_all,
    chosen,
    composed,
    learned,
    only_problem,
)

SFT = {
    "loss": chosen("loss", "sft"),
    "sampler": chosen("sampler", "demonstrations"),
    "advantage": chosen("advantage", "none"),
}
MODEL = {**chosen("reference", "model"), "path": "some/teacher", "dtype": "bfloat16"}
ENDPOINT = {**chosen("reference", "endpoint"), "url": "http://there/v1", "model": "t"}
INITIAL = chosen("reference", "initial")
DISTILL = {"loss": chosen("loss", "distill"), "reference": MODEL}
FORWARD = {"loss": chosen("loss", "forward_kl_topk"), "reference": MODEL}
REVERSE = {"loss": chosen("loss", "reverse_kl_topk"), "reference": MODEL}
MIXTURE = composed("env=mixture")["env"]
KL = {"kl.beta": 0.01}
IN_REWARD = {**KL, "kl.estimator": {"_target_": "losses.kl.k1"}, "kl.place": "reward"}
PPO = {
    "loss": chosen("loss", "ppo_clip"),
    "advantage": chosen("advantage", "none"),
    "critic": composed("loss=ppo")["critic"],
}
MUON = {**chosen("optim", "adamw"), **chosen("optim", "muon"), "learning_rate": 1e-3}
TWICE = {"updates_per_batch": 2}


def several(loss: str = "distill", **teachers: Any) -> Changes:
    """Return a mixture of reverse-text and arithmetic; `reverse` means the former."""
    names = {"reverse": "reverse-text"}
    node = chosen("reference", "per_env")
    node["teachers"] = {names.get(name, name): teacher for name, teacher in teachers.items()}
    return {"loss": chosen("loss", loss), "env": MIXTURE, "reference": node}


BOTH = several(reverse=MODEL, arithmetic=ENDPOINT)

WHITEN = {"batch_credit": chosen("batch_credit", "whiten")}
REPLAY = {"buffer": composed("buffer=replay")["buffer"]}
COMPOSED = composed("loss=sft_and_rl")
SHOWN = {name: COMPOSED[name] for name in ("buffer", "loss")}

REFUSED: dict[str, tuple[Changes, str]] = {
    "a batch credit that the critic would replace": (
        {**PPO, **WHITEN},
        "replaces the advantages of rl.rollouts.batch_credit.whiten: use batch_credit=none, or",
    ),
    "a batch credit that the loss does not read": (
        {**SFT, **WHITEN},
        "but losses.cross_entropy.cross_entropy reads none: use batch_credit=none",
    ),
    "groups that are too old before they can be replayed": (
        {**REPLAY, "buffer.max_staleness": 4, "sampler.max_staleness": 4},
        "sampler.max_staleness=4 versions old in its first batch: use buffer.max_staleness=12",
    ),
    "replays for a loss without a ratio": (
        {**REPLAY, "loss": chosen("loss", "reinforce")},
        "but buffer.replay_share=0.25 adds rollouts of earlier policies: use loss=cispo",
    ),
    "demonstrations for a loss with a ratio": (
        {**SHOWN, "loss": chosen("loss", "cispo")},
        "adds text that no policy sampled: use loss=sft_and_rl, or buffer=fifo",
    ),
    "a correction of demonstrations": (
        {**SHOWN, **TWICE, "correction": chosen("correction", "tis_token")},
        "demonstrations of buffer.demonstration_share=0.25 lack: use correction=none",
    ),
    "a share that leaves no new group": (
        {**REPLAY, "batch_size": 32, "group_size": 32},
        "leave no new groups in a batch of 1 groups: lower them, or raise batch_size",
    ),
    "a refresh that nothing reads": (
        {"reference.refresh_every": 10},
        "nor a KL penalty uses rl.learner.reference.local.InitialPolicy: set kl.beta=0.01",
    ),
    "hints that nothing reads": (
        {"reference": {**INITIAL, "sees_hint": True}},
        "nor a KL penalty uses rl.learner.reference.local.InitialPolicy: set kl.beta=0.01",
    ),
    "a refresh of the frozen base": (
        {**KL, "reference.refresh_every": 10, "adapter": chosen("adapter", "lora")},
        "an adapter freezes: set reference.refresh_every=0, or use adapter=none",
    ),
    "an endpoint among kept tokens": (
        {**DISTILL, "reference": ENDPOINT, "sampler.top_k": 20},
        "among all tokens, but with sampler.top_k=20 the trainer needs logprobs among those that "
        "vLLM kept: use reference=model, or accept a bias with sampler.allow_biased_ratio=true",
    ),
    "k1 in the loss": (
        {**IN_REWARD, "kl.place": "loss"},
        "the mean of its gradient is zero: use kl.place=reward, or kl=k3",
    ),
    "k3 in the reward": (
        {**KL, "kl.place": "reward"},
        "kl.place=reward with losses.kl.k3 has a biased gradient: use kl=k1",
    ),
    "hints in demonstrations": (
        {**FORWARD, **SFT, "loss": FORWARD["loss"], "reference": {**MODEL, "sees_hint": True}},
        "reference.sees_hint=true adds hints to prompts of sampled rollouts, but "
        "rl.sampling.demonstrations.DemonstrationSampler samples none: set reference.sees_hint=",
    ),
    "teachers without a mixture": (
        {**BOTH, "env": composed("env=arithmetic")["env"]},
        "rl.learner.reference.per_env.PerEnvironment has a teacher for each environment of a "
        "mixture, but env is a single environment: use reference=model, or env=mixture",
    ),
    "an environment without a teacher": (
        several(reverse=MODEL),
        "reference.teachers has no teacher for arithmetic of env.envs: add "
        "+reference@reference.teachers.arithmetic=model "
        "reference.teachers.arithmetic.path=<its teacher>",
    ),
    "no teacher": (several(), "no teacher for reverse-text and for arithmetic of env.envs"),
    "a teacher without an environment": (
        several(reverse=MODEL, arithmetic=MODEL, arithmetics=MODEL),
        "reference.teachers.arithmetics is not an environment of env.envs: did you",
    ),
    "different numbers of candidates": (
        several("forward_kl_topk", reverse=MODEL, arithmetic={**MODEL, "top_k": 4}),
        "reference.teachers.arithmetic.top_k=4 and reference.teachers.reverse-text.top_k=16 "
        "differ, but the loss needs the same number of candidate tokens from each teacher",
    ),
    "one teacher at another temperature": (
        {**BOTH, "sampler.temperature": 0.7},
        "reference.teachers.arithmetic=endpoint returns logprobs at temperature 1, but "
        "sampler.temperature=0.7: set sampler.temperature=1, or use",
    ),
    "the policy as one teacher": (
        several(reverse=MODEL, arithmetic=INITIAL),
        "reference.teachers.arithmetic=initial is the policy before training",
    ),
    "no reference as one teacher": (
        several(reverse=MODEL, arithmetic=chosen("reference", "none")),
        "reference.teachers.arithmetic is rl.learner.reference.protocol.NoReference, which returns",
    ),
    "a critic whose policy never moves": (
        {**PPO, "critic.head_start": 20, "max_steps": 20},
        "critic.head_start=20 leaves no steps of max_steps=20 for the policy: set",
    ),
    "a critic with pieces of matrices": (
        {**PPO, "critic.optim": MUON, "deepspeed": {"zero_optimization": {"stage": 2}}},
        "flattened pieces of them: use deepspeed=zero0, or optim@critic.optim=adamw",
    ),
}

ALLOWED: dict[str, Changes] = {
    "a refreshed reference": {**KL, "reference.refresh_every": 10, "reference.refresh_mix": 0.5},
    "a teacher at another temperature": {**DISTILL, "sampler.temperature": 0.7},
    "a steered penalty": {**KL, "kl.target_kl": 0.1},
    "k1 without weight": {**IN_REWARD, "kl.place": "loss", "kl.beta": 0.0},
    "several updates of demonstrations": {**SFT, **TWICE},
    "demonstrations near the initial policy": {**SFT, **KL},
    "one demonstration for each example": {**SFT, "group_size": 1},
    "candidates in several updates": {**REVERSE, **TWICE},
    "candidates of truncated sampling": {**REVERSE, "sampler.top_p": 0.9},
    "candidates of a server": {**FORWARD, "reference": ENDPOINT},
    "a teacher with hints": {**DISTILL, "reference": {**MODEL, "sees_hint": True}},
    "the policy with hints": {**REVERSE, "reference": {**INITIAL, "sees_hint": True}},
    "a teacher for each": BOTH,
    "hints for one of them": several(reverse={**INITIAL, "sees_hint": True}, arithmetic=MODEL),
    "different numbers that nothing reads": several(
        reverse=MODEL, arithmetic={**MODEL, "top_k": 4}
    ),
    "a divergence for each": {**KL, **{k: v for k, v in BOTH.items() if k != "loss"}},
    "penalties of separate rewards": {
        "advantage": chosen("advantage", "max_rl"),
        "truncation": {**chosen("truncation", "penalty"), "limit": 8},
        **{"reward.normalise_each": True, "reward.length_penalty": 0.1},
    },
    "a critic of turns": {
        **PPO,
        **{"critic.over": "turns", "critic.loss.clip": 0.2, "updates_per_batch": 4},
    },
    "a critic and a penalty in the reward": {**PPO, **IN_REWARD},
    "a critic with an optimizer of its own": {**PPO, "critic.optim": MUON},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused_in_one_sentence(
    name: str, config: dict[str, Any]
) -> None:
    changes, said = REFUSED[name]
    problem = only_problem(changed(config, changes))
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_what_goes_together_is_allowed(name: str, config: dict[str, Any]) -> None:
    check_all(changed(config, ALLOWED[name]))


LOSSES = (
    *("cispo", "ppo_clip", "grpo", "gspo", "masked_is", "dppo", "sapo"),  # they take ratios
    *("rloo", "reinforce", "distill"),  # they assume that the policy sampled its tokens
)
SAMPLING = {
    "top_k": 129,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
}


@pytest.mark.parametrize(
    ("loss", "key", "value"),
    [
        *((loss, "top_p", 0.9) for loss in LOSSES),
        *(("cispo", key, value) for key, value in SAMPLING.items()),
    ],
)
def test_learning_from_another_distribution_must_be_accepted(
    loss: str, key: str, value: float, config: dict[str, Any]
) -> None:
    changes = {
        "loss": chosen("loss", loss),
        "aggregation": chosen("aggregation", "sequence_mean"),
        f"sampler.{key}": value,
    }
    if loss == "distill":
        changes["reference"] = MODEL
    with pytest.raises(ConfigError) as caught:
        check_all(changed(config, changes))
    (problem,) = caught.value.problems
    target = chosen("loss", loss)["_target_"]
    assert problem.startswith(f"with sampler.{key}={value} vLLM does not sample the policy's")
    assert f"so {target} is biased: " in problem
    assert problem.endswith("accept the bias with sampler.allow_biased_ratio=true")
    check_all(changed(config, {**changes, "sampler.allow_biased_ratio": True}))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_k": 128, "top_p": 0.9, "min_p": 0.1}])
def test_limits_are_exact_if_top_k_bounds_them(
    loss: str, limits: dict[str, float], config: dict[str, Any]
) -> None:
    changes = {
        "loss": chosen("loss", loss),
        "aggregation": chosen("aggregation", "sequence_mean"),
        **{f"sampler.{key}": value for key, value in limits.items()},
    }
    if loss == "distill":
        changes["reference"] = MODEL
    check_all(changed(config, changes))
    problem = only_problem(changed(config, {**changes, "sampler.presence_penalty": 0.5}))
    assert problem.startswith("with sampler.presence_penalty=0.5 vLLM does not sample")
    assert "remove the option" in problem


def test_vllm_returns_twice_top_k_tokens_and_at_least_twenty() -> None:
    numbers = {1: 20, 10: 20, 11: 22, 128: 256, 129: 0, 0: 0, -1: 0}
    assert {k: num_returned_tokens({"top_k": k, "top_p": 0.9}) for k in numbers} == numbers
    for other in ({"allow_biased_ratio": True}, {"repetition_penalty": 1.1}):
        assert num_returned_tokens({"top_k": 8, **other}) == 0


def test_an_endpoint_needs_temperature_1_at_each_step(config: dict[str, Any]) -> None:
    cooler = {"_target_": "rl.schedule.linear", "start": 1.0, "end": 0.6, "steps": 9}
    given = changed(config, {**DISTILL, "reference": ENDPOINT, "sampler.temperature": cooler})
    facts = Learned.from_settings(learned(loss_reads=["ref_logprobs"]))
    (problem,) = each_reference_problems(split_schedules(given), facts)
    assert problem.startswith("reference=endpoint returns logprobs at temperature 1, but sampler.")


def test_a_limit_without_top_k_says_how_it_becomes_exact(config: dict[str, Any]) -> None:
    problem = only_problem(changed(config, {"sampler.top_p": 0.9, "sampler.min_p": 0.1}))
    assert problem.startswith("with sampler.top_p=0.9 and sampler.min_p=0.1 vLLM does not sample")
    assert "is biased: add sampler.top_k=128 or less, or accept the bias" in problem


def test_hints_are_seen_by_environment_and_only_where_something_reads_them(
    config: dict[str, Any],
) -> None:
    mixed = changed(config, ALLOWED["hints for one of them"])
    assert sees_hint(mixed, "reverse-text")
    assert not sees_hint(mixed, "arithmetic")
    assert sees_hint(changed(config, ALLOWED["a teacher with hints"]), "any name")
    assert not sees_hint(config, "arithmetic")


def test_teachers_may_be_named_on_the_command_line(tmp_path: Path) -> None:
    config = composed(
        "loss=distill",
        "env=mixture",
        "reference=per_env",
        "+reference@reference.teachers.reverse-text=model",
        "reference.teachers.reverse-text.path=some/teacher",
        "+reference@reference.teachers.arithmetic=endpoint",
        "reference.teachers.arithmetic.url=http://there/v1",
        "reference.teachers.arithmetic.model=t",
        f"output_dir={tmp_path}",
    )
    check_all(config)
    targets = [node["_target_"] for node in config["reference"]["teachers"].values()]
    assert [target.rpartition(".")[2] for target in targets] == ["FrozenModel", "Endpoint"]


def test_ppo_brings_its_critic_and_the_command_line_wins(tmp_path: Path) -> None:
    critic = composed("loss=ppo", f"output_dir={tmp_path}", "critic.optim.learning_rate=0.5")
    assert critic["critic"]["optim"]["learning_rate"] == 0.5
    assert critic["optim"]["learning_rate"] != 0.5
    muon = composed("loss=ppo", f"output_dir={tmp_path}", "optim@critic.optim=muon")
    assert muon["critic"]["optim"]["_target_"] == "rl.learner.optim.Muon"
    assert muon["optim"]["_target_"] == "rl.learner.optim.AdamW"
    none = composed("loss=ppo", "critic=none", f"output_dir={tmp_path}")
    assert none["critic"] == chosen("critic", "none")
