"""Each senseless combination is refused in one sentence; its neighbours that make sense are not."""

from typing import Any

import pytest

from rl.config.schema import ConfigError
from rl.config.transport import VLLM_RANKS, obstacle
from tests.support.composing import (
    Changes,
    changed,
    check_all,
    chosen,
    composed,
    only_problem,
)

NONE = chosen("advantage", "none")
SFT = {
    "loss": chosen("loss", "sft"),
    "sampler": chosen("sampler", "demonstrations"),
    "advantage": NONE,
}
ZERO = {stage: {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)}
MUON = {**chosen("optim", "adamw"), **chosen("optim", "muon"), "learning_rate": 1e-3}
GSPO = {"loss": chosen("loss", "gspo")}
SEQUENCE_MEAN = chosen("aggregation", "sequence_mean")
MIXTURE = {
    "_target_": "envs.mixture.Mixture",
    "envs": {"words": chosen("env", "reverse-text")},
    "weights": {"words": 1.0},
}


def lora(**knobs: Any) -> Changes:
    return {"adapter": {**chosen("adapter", "lora"), **knobs}}


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
        "batch_size=4 leaves some of trainer.ranks=8 idle: use at most 4",
    ),
    "head and overrides": (
        {"model.head_dtype": "float32", "inference.args": {"hf-overrides": "{}"}},
        "model.head_dtype=float32 and inference.args.hf_overrides exclude each other",
    ),
    "no spread": (
        {
            "group_size": 1,
            "buffer": chosen("buffer", "difficulty"),
            "advantage": chosen("advantage", "none"),
        },
        "group_size=1 has no spread, so the buffer would reject every group",
    ),
    "group of one": ({"group_size": 1}, "group_size=1 with losses.advantages.group_mean makes"),
    "negative seed": ({"seed": -1}, "seed=-1, but it must be >= 0"),
    "no steps": ({"max_steps": 0, "optim.warmup_steps": 0}, "max_steps=0, but it must be >= 1"),
    "empty batch": ({"batch_size": 0}, "batch_size=0, but it must be >= 1"),
    "greedy": ({"sampler.temperature": 0.0}, "sampler.temperature=0.0, but it must be > 0"),
    "top_p too large": (
        {"sampler.top_p": 1.5, "sampler.allow_biased_ratio": True},
        "sampler.top_p=1.5, but it must be <= 1",
    ),
    "beta": ({"optim.beta2": 1.0}, "optim.beta2=1.0, but it must be < 1"),
    "turn as long as the row": (
        {"sampler.max_tokens": 256},
        "sampler.max_tokens=256 leaves no room for the prompt in max_seq_len=256",
    ),
    "prompt as long as the row": (
        {"sampler.max_prompt_len": 256},
        "sampler.max_prompt_len=256 leaves no room for an answer in max_seq_len=256",
    ),
    "prompts that only the server measures": (
        {"sampler.max_prompt_len": 200, "client": chosen("client", "tokens")},
        "cannot be kept with rl.sampling.tokens_chat.TokensClient, because only the server",
    ),
    "prompts of a library's own": (
        {"sampler.max_prompt_len": 200, "env": {**chosen("env", "verifiers"), "id": "x"}},
        "cannot be kept with envs.verifiers.environment.Verifiers, which writes its prompts itself",
    ),
    "a part that may take longer than vLLM": (
        {"env": MIXTURE | {"sampling": {"words": {"rollout_timeout": 900.0}}}},
        "env.sampling.words.rollout_timeout=900.0 exceeds sampler.rollout_timeout=300.0",
    ),
    "a part whose turn is as long as the row": (
        {"env": MIXTURE | {"sampling": {"words": {"max_tokens": 256}}}},
        "env.sampling.words.max_tokens=256 leaves no room for the prompt in max_seq_len=256",
    ),
    "prompts of a library's own, in a mixture": (
        {
            "sampler.max_prompt_len": 200,
            "env": MIXTURE | {"envs": {"words": {**chosen("env", "verifiers"), "id": "x"}}},
        },
        "cannot be kept with envs.verifiers.environment.Verifiers, which writes its prompts itself",
    ),
    "row longer than the model": (
        {"max_seq_len": 512},
        "max_seq_len=512 exceeds model.max_seq_len=256: raise that one instead",
    ),
    "gspo per token": (GSPO, "long sequences count more: use aggregation=sequence_mean"),
    "sapo per token": ({"loss": chosen("loss", "sapo")}, "use aggregation=sequence_mean"),
    "bounds": (
        {"loss.clip_low": 5.0},
        "loss.clip_low=5.0 is not below loss.clip_high=5.0: move one of them",
    ),
    "band": (
        {"loss": {**chosen("loss", "masked_is"), "ratio_low": 9.0}},
        "loss.ratio_low=9.0 is not below loss.ratio_high=8.0: move one of them",
    ),
    "dual clip": (
        {"loss": {**chosen("loss", "ppo_clip"), "dual_clip": 0.5}},
        "loss.dual_clip=0.5, but it must be > 1",
    ),
    "imitating oneself": ({"loss": SFT["loss"]}, "add sampler=demonstrations, or choose another"),
    "rewarding demonstrations": ({"sampler": SFT["sampler"]}, "add loss=sft, or choose"),
    **{
        f"muon under ZeRO {stage}": (
            {"optim": MUON, "deepspeed": ZERO[stage]},
            f"ZeRO stage {stage} gives an optimizer flattened pieces of them: use deepspeed=zero0",
        )
        for stage in (1, 2, 3)
    },
    **{
        f"{key} under ZeRO {stage}": (
            {"deepspeed": {"zero_optimization": {"stage": stage, key: {"device": "cpu"}}}},
            f"deepspeed.zero_optimization.{key}.device=cpu under ZeRO stage {stage} loses",
        )
        for key in ("offload_optimizer", "offload_param")
        for stage in (0, 1, 2)
    },
    "compiled layers under ZeRO 3": (
        {"trainer.compile": True, "deepspeed": ZERO[3]},
        "trainer.compile=true compiles whole layers, and ZeRO stage 3 gathers weights inside",
    ),
    "momentum": (
        {"optim": {**MUON, "momentum": 1.0}},
        "optim.momentum=1.0, but it must be < 1",
    ),
    "AdamW stands still": (
        {"optim": {**MUON, "adamw_ratio": 0.0}},
        "optim.adamw_ratio=0.0, but it must be > 0",
    ),
    "patience": (
        {"sampler.rollout_timeout": 700.0},
        "one slow rollout (sampler.rollout_timeout=700.0 s) would stop the run",
    ),
    "no time": ({"max_time": "3x"}, "max_time=3x is not a time: write 3h30m, 90m, a number of"),
    "time that is over": ({"max_time": 0}, "max_time=0 is not a time: write 3h30m, 90m"),
    "nothing is rewarded": (
        {"env.reward_weights": {"exact": 0.0}},
        "env.reward_weights={'exact': 0.0} makes every reward 0: give one a weight",
    ),
    "adapter sync without an adapter": (
        SYNC_ADAPTER,
        "sync=adapter, but there is no adapter: add adapter=lora, or use sync=auto",
    ),
    "adapter sync with whole modules": (
        {**lora(modules_to_save=["norm"]), **SYNC_ADAPTER},
        "(adapter.modules_to_save=['norm']): leave them out, or use sync=auto",
    ),
    "adapter sync beyond vLLM's ranks": (
        {**lora(rank=513), **SYNC_ADAPTER},
        "vLLM takes adapter.rank=512 at most, not 513: lower it, or use sync=auto",
    ),
    "adapter sync without a base": (
        {**lora(), **SYNC_ADAPTER, "model.warm_start": None},
        "vLLM has no base to add an adapter to: give model.warm_start, or use sync=auto",
    ),
    "adapter of nothing": (
        lora(target_modules=[]),
        "adapter.target_modules=[] leaves LoRA no layer: use all-linear, or name some",
    ),
    "rank": (lora(rank=0), "adapter.rank=0, but it must be >= 1"),
    "scale": (lora(alpha=0.0), "adapter.alpha=0.0, but it must be > 0"),
    "dropout": (lora(dropout=1.0), "adapter.dropout=1.0, but it must be < 1"),
    "run without a name": ({"run_name": ""}, 'run_name="" is no name for a folder'),
    "run elsewhere": ({"run_name": "../../there"}, "is no name for a folder below output_dir"),
}

ALLOWED: dict[str, Changes] = {
    "as shipped": {},
    "one rollout per example without a baseline": {"group_size": 1, "advantage": NONE},
    "gspo per sequence": {**GSPO, "aggregation": SEQUENCE_MEAN},
    "imitating demonstrations": SFT,
    "imitating one demonstration each": {**SFT, "group_size": 1},
    "truncated sampling, knowingly": {"sampler.top_p": 0.9, "sampler.allow_biased_ratio": True},
    "muon with whole matrices": {"optim": MUON, "deepspeed": ZERO[0]},
    "muon with DeepSpeed's default stage": {"optim": MUON, "deepspeed": {}},
    "adapter alone": {**lora(), **SYNC_ADAPTER},
    "adapter with whole modules, merged": lora(modules_to_save=["norm"]),
    "adapter of some layers": lora(target_modules=["q_proj"]),
    "short run": {"max_steps": 2},
    "one of several rewards": {"env.reward_weights": {"exact": 0.0, "similarity": 1.0}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_senseless_combination_is_refused_in_one_sentence(
    name: str, config: dict[str, Any]
) -> None:
    changes, said = REFUSED[name]
    problem = only_problem(changed(config, changes))
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_a_combination_that_makes_sense_is_allowed(name: str, config: dict[str, Any]) -> None:
    check_all(changed(config, ALLOWED[name]))


RATIO_LOSSES = ("cispo", "ppo_clip", "grpo", "gspo", "masked_is", "dppo", "sapo")
ON_POLICY = ("rloo", "reinforce", "distill")  # what they are given is the policy's own, they trust


@pytest.mark.parametrize("loss", [*RATIO_LOSSES, *ON_POLICY])
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
def test_learning_from_truncated_sampling_needs_a_yes(
    loss: str, knob: str, value: float, config: dict[str, Any]
) -> None:
    changes = {
        "loss": chosen("loss", loss),
        "aggregation": SEQUENCE_MEAN,
        f"sampler.{knob}": value,
    }
    if loss == "distill":
        changes["reference"] = {**chosen("reference", "model"), "path": "a/b", "dtype": "float32"}
    with pytest.raises(ConfigError) as caught:
        check_all(changed(config, changes))
    (problem,) = caught.value.problems
    what = "every ratio in" if loss in RATIO_LOSSES else chosen("loss", loss)["_target_"]
    assert problem.startswith(f"sampler.{knob}={value} changes what is sampled, so {what}")
    assert problem.endswith("accept that with sampler.allow_biased_ratio=true")
    check_all(changed(config, {**changes, "sampler.allow_biased_ratio": True}))


def test_the_default_is_one_step_off_policy_from_the_policys_own_distribution(config):
    sampler = config["sampler"]
    assert (sampler["max_staleness"], sampler["temperature"]) == (1, 1.0)
    assert (sampler["top_p"], sampler["top_k"], sampler["min_p"]) == (1.0, -1, 0.0)


def test_a_turn_as_long_as_the_row_leaves_no_room_and_one_token_less_does(config):
    longest = config["max_seq_len"]
    full = changed(config, {"sampler.max_tokens": longest})
    assert "leaves no room for the prompt" in only_problem(full)
    check_all(changed(config, {"sampler.max_tokens": longest - 1}))


@pytest.mark.parametrize(("dual", "refused"), [(1.0, True), (1.01, False), (None, False)])
def test_a_dual_clip_must_exceed_one(dual, refused):
    config = changed(composed("loss=ppo_clip", "output_dir=nowhere"), {"loss.dual_clip": dual})
    if refused:
        assert "must be > 1" in only_problem(config)
    else:
        check_all(config)


@pytest.mark.parametrize(("top_p", "bound"), [(0.0, "> 0"), (1.01, "<= 1")])
def test_both_ends_of_a_range_count(config, top_p, bound):
    assert only_problem(changed(config, {"sampler.top_p": top_p})).endswith(f"must be {bound}")
    check_all(changed(config, {"sampler.top_p": 1.0}))


def test_the_largest_rank_that_vllm_takes_is_taken():
    node = {"_target_": "rl.model.lora.LoRA", "modules_to_save": [], "rank": VLLM_RANKS[-1]}
    model = {"_target_": "rl.model.pretrained.PretrainedModel"}
    assert obstacle(node, model) is None
    assert "at most" in (obstacle({**node, "rank": VLLM_RANKS[-1] + 1}, model) or "")
