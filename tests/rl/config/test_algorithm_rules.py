"""Parts of an algorithm that do not go together are refused in one sentence; neighbours are not."""

from typing import Any

import pytest

from tests.support.composing import Changes, changed, check_all, chosen, only_problem

LOSSES = {name: {"loss": chosen("loss", name)} for name in ("distill", "reinforce", "ppo_clip")}
SFT = {
    "loss": chosen("loss", "sft"),
    "sampler": chosen("sampler", "demonstrations"),
    "advantage": chosen("advantage", "none"),
}
MAX_RL = {"advantage": chosen("advantage", "max_rl")}
PENALTY = {"truncation": {**chosen("truncation", "penalty"), "limit": 32}}
ZERO_REWARD = {"truncation": chosen("truncation", "zero_reward")}
DIFFICULTY = {"buffer": chosen("buffer", "difficulty")}
POOLS = {"order": chosen("order", "difficulty")}
WEIGHTS = ("order.easy_weight", "order.normal_weight", "order.hard_weight")
NO_REFERENCE = {"reference": chosen("reference", "none")}
TEACHER = {
    "reference": {**chosen("reference", "model"), "path": "some/teacher", "dtype": "bfloat16"}
}
ENDPOINT = {
    "reference": {**chosen("reference", "endpoint"), "url": "http://there/v1", "model": "t"}
}
DISTILL = {**LOSSES["distill"], **TEACHER}
KL = {"kl.beta": 0.01}
K1 = {"kl.estimator": {"_target_": "losses.kl.k1"}, **KL}
IN_REWARD = {**K1, "kl.place": "reward"}
TWICE = {"updates_per_batch": 2}


def corrected(name: str, **knobs: float) -> Changes:
    return {"correction": {**chosen("correction", name), **knobs}}


REFUSED: dict[str, tuple[Changes, str]] = {
    "a penalty in the reward that the loss does not read": (
        {**DISTILL, **IN_REWARD},
        "kl.place=reward pulls by the advantages, and losses.distill.distill reads none: use kl=k3",
    ),
    "a teacher that nobody reads": (
        TEACHER,
        "nothing reads rl.learner.reference.local.FrozenModel: add kl.beta=0.01, or loss=distill",
    ),
    "a server that nobody reads": (ENDPOINT, "add kl.beta=0.01, or loss=distill for a teacher"),
    "a refresh that nobody reads": (
        {"reference.refresh_every": 10},
        "nothing reads rl.learner.reference.local.InitialPolicy: add kl.beta=0.01",
    ),
    "a refresh of the frozen base": (
        {**KL, "reference.refresh_every": 10, "adapter": chosen("adapter", "lora")},
        "with adapter=lora is the frozen base: set it to 0, or use adapter=none",
    ),
    "divergence from nothing": (
        {**KL, **NO_REFERENCE},
        "kl.beta=0.01 needs a reference and reference=none has none: use reference=initial",
    ),
    "no teacher": (
        {**LOSSES["distill"], **NO_REFERENCE},
        "losses.distill.distill needs a reference and reference=none has none: use reference=model",
    ),
    "its own teacher": (
        LOSSES["distill"],
        "reference=initial is the policy itself: use reference=",
    ),
    "endpoint at another temperature": (
        {**LOSSES["distill"], **ENDPOINT, "sampler.temperature": 0.7},
        "logprobs at temperature 1 and sampler.temperature=0.7: sample at 1, or load",
    ),
    "steering nothing": ({"kl.target_kl": 0.1}, "kl.target_kl=0.1 steers kl.beta=0, which stays 0"),
    "k1 in the loss": (K1, "has a gradient of zero on average: use kl.place=reward, or kl=k3"),
    "k3 in the reward": (
        {**KL, "kl.place": "reward"},
        "kl.place=reward with losses.kl.k3 is no unbiased penalty: use kl=k1",
    ),
    "k2 in the reward": (
        {**KL, "kl.place": "reward", "kl.estimator": {"_target_": "losses.kl.k2"}},
        "kl.place=reward with losses.kl.k2 is no unbiased penalty: use kl=k1",
    ),
    "one penalty, many rewards": (
        {**IN_REWARD, "reward.normalise_each": True},
        "reward.normalise_each=true knows only single ones: set one of them back",
    ),
    "reinforce off-policy": (
        {**LOSSES["reinforce"], **TWICE},
        "in the first of updates_per_batch=2 only: use updates_per_batch=1 or loss=cispo",
    ),
    "distill off-policy": ({**DISTILL, **TWICE}, "losses.distill.distill assumes that the policy"),
    "correcting twice": (
        corrected("tis_token"),
        "losses.correction.tis_token would count the difference twice: use correction=none or",
    ),
    "correction band": (
        {**TWICE, **corrected("icepop", low=5.0)},
        "correction.low=5.0 is not below correction.high=5.0: move one of them",
    ),
    "max_rl and the soft limit": (
        {**MAX_RL, **PENALTY},
        "max_rl needs rewards >= 0 and rl.rollouts.truncation.penalty lowers them: "
        "use advantage=group_mean",
    ),
    "max_rl and length": (
        {**MAX_RL, "reward.length_penalty": 0.1},
        "and reward.length_penalty low",
    ),
    "max_rl and divergence": ({**MAX_RL, **IN_REWARD}, "and kl.place=reward lowers them"),
    "max_rl and what truncation took": (
        {**MAX_RL, **ZERO_REWARD, "reward.normalise_each": True},
        "truncation.zero_reward with reward.normalise_each lowers them: use advantage=group_mean",
    ),
    "buffer bounds": (
        {**DIFFICULTY, "buffer.min_reward": 0.9, "buffer.max_reward": 0.9},
        "buffer.min_reward=0.9 is not below buffer.max_reward=0.9: move one of them",
    ),
    "thresholds of pools": (
        {**POOLS, "order.easy_threshold": 0.2, "order.hard_threshold": 0.8},
        "order.hard_threshold=0.8 is not below order.easy_threshold=0.2: move one of them",
    ),
    "one threshold for both pools": (
        {**POOLS, "order.easy_threshold": 0.5, "order.hard_threshold": 0.5},
        "order.hard_threshold=0.5 is not below order.easy_threshold=0.5",
    ),
    "no pool to draw from": (
        {**POOLS, **dict.fromkeys(WEIGHTS, 0.0)},
        "order.easy_weight=0.0, order.normal_weight=0.0, order.hard_weight=0.0 leave no pool of "
        "examples to draw from: give one a weight",
    ),
    "pools of demonstrations": (
        {**SFT, **POOLS},
        "DifficultyOrder says which examples the policy plays, and rl.sampling.demonstrations."
        "DemonstrationSampler gives it text to imitate instead: leave order out, or choose",
    ),
    "demonstrations in order": (
        {**SFT, "order": chosen("order", "sequential")},
        "SequentialOrder says which examples the policy plays",
    ),
    "demonstrations cut off": ({**SFT, **ZERO_REWARD}, "truncation says what to do with sampled"),
    "long demonstrations": (
        {**SFT, "reward.length_penalty": 0.1},
        "reward.length_penalty says what",
    ),
    "many rewards of demonstrations": (
        {**SFT, "reward.normalise_each": True},
        "reward.normalise_each says what to do with sampled rollouts, and "
        "rl.sampling.demonstrations.DemonstrationSampler gives none: leave it out",
    ),
    "correcting demonstrations": (
        {**SFT, **TWICE, **corrected("mis")},
        "correction says what to do",
    ),
    "hard demonstrations": ({**SFT, **DIFFICULTY}, "buffer says what to do with sampled rollouts"),
    "divergence in demonstrations' reward": (
        {**SFT, **IN_REWARD},
        "kl.place=reward says what to do",
    ),
}

OUT_OF_RANGE: list[tuple[Changes, str]] = [
    ({"updates_per_batch": 0}, "updates_per_batch=0, but it must be >= 1"),
    ({"entropy_bonus": -0.1}, "entropy_bonus=-0.1, but it must be >= 0"),
    ({"reward.length_penalty": -0.1}, "reward.length_penalty=-0.1, but it must be >= 0"),
    ({**PENALTY, "truncation.limit": 0}, "truncation.limit=0, but it must be >= 1"),
    ({**PENALTY, "truncation.start": 1.0}, "truncation.start=1.0, but it must be < 1"),
    ({**PENALTY, "truncation.weight": -1.0}, "truncation.weight=-1.0, but it must be >= 0"),
    ({**DIFFICULTY, "buffer.min_spread": -0.1}, "buffer.min_spread=-0.1, but it must be >= 0"),
    (
        {**DIFFICULTY, "buffer.min_reward_variance": -0.1},
        "buffer.min_reward_variance=-0.1, but it must be >= 0",
    ),
    *(({**POOLS, key: -0.1}, f"{key}=-0.1, but it must be >= 0") for key in WEIGHTS),
    ({"kl.beta": -0.01}, "kl.beta=-0.01, but it must be >= 0"),
    ({**KL, "kl.target_kl": 0.0}, "kl.target_kl=0.0, but it must be > 0"),
    ({**KL, "reference.refresh_every": -1}, "reference.refresh_every=-1, but it must be >= 0"),
    ({"reference.refresh_mix": 0.0}, "reference.refresh_mix=0.0, but it must be > 0"),
    ({"reference.refresh_mix": 1.5}, "reference.refresh_mix=1.5, but it must be <= 1"),
    (
        {**LOSSES["distill"], **ENDPOINT, "reference.timeout": 0.0},
        "reference.timeout=0.0, but it must be > 0",
    ),
    ({**TWICE, **corrected("tis_token", cap=0.0)}, "correction.cap=0.0, but it must be > 0"),
    ({**TWICE, **corrected("mis", low=-0.5)}, "correction.low=-0.5, but it must be >= 0"),
]

ALLOWED: dict[str, Changes] = {
    "divergence from the initial policy": KL,
    "refreshed now and then": {**KL, "reference.refresh_every": 10, "reference.refresh_mix": 0.5},
    "divergence from another model": {**KL, **TEACHER},
    "no reference where none is read": NO_REFERENCE,
    "a teacher": DISTILL,
    "a teacher elsewhere": {**LOSSES["distill"], **ENDPOINT},
    "a teacher at another temperature": {**DISTILL, "sampler.temperature": 0.7},
    "a steered penalty": {**KL, "kl.target_kl": 0.1},
    "k1 in the reward": IN_REWARD,
    "k1 without weight": {**K1, "kl.beta": 0.0},
    "k2 in the loss": {**KL, "kl.estimator": {"_target_": "losses.kl.k2"}},
    "several updates": TWICE,
    "several updates of ppo": {**LOSSES["ppo_clip"], **TWICE},
    "several updates of demonstrations": {**SFT, **TWICE},
    "several updates, corrected": {**TWICE, **corrected("tis_sequence")},
    "an entropy bonus": {"entropy_bonus": 0.01},
    "max_rl and zero rewards": {**MAX_RL, **ZERO_REWARD},
    "max_rl of many rewards": {**MAX_RL, "reward.normalise_each": True},
    "shaped rewards": {**PENALTY, "reward.length_penalty": 0.1, "reward.normalise_each": True},
    "neither too hard nor too easy": {
        **DIFFICULTY,
        "buffer.min_reward": 0.1,
        "buffer.max_reward": 0.9,
    },
    "pools, one of them alone": {
        **POOLS,
        **dict.fromkeys(WEIGHTS, 0.0),
        "order.normal_weight": 2.0,
    },
    "pools of rewards below zero": {
        **POOLS,
        "order.hard_threshold": -2.0,
        "order.easy_threshold": -1.0,
    },
    "pools and a filter": {**POOLS, **DIFFICULTY, "buffer.min_reward_variance": 0.1},
    "the order of the data": {"order": chosen("order", "sequential")},
    "cut off, no lesson and no reward": {"truncation": chosen("truncation", "mask_zero")},
    "demonstrations near the initial policy": {**SFT, **KL},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [*REFUSED.values(), *OUT_OF_RANGE],
    ids=[*REFUSED, *(said.partition(",")[0] for _, said in OUT_OF_RANGE)],
)
def test_parts_that_do_not_go_together_are_refused_in_one_sentence(
    changes: Changes, said: str, config: dict[str, Any]
) -> None:
    problem = only_problem(changed(config, changes))
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_parts_that_go_together_are_allowed(name: str, config: dict[str, Any]) -> None:
    check_all(changed(config, ALLOWED[name]))
