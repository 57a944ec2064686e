"""Check that the reference model, used as a teacher or for a KL penalty, suits the algorithm."""

from collections.abc import Iterator, Mapping

from rl.config.facts import Config, fact, is_imitator, references
from rl.config.learned import REFERENCE, Learned
from rl.config.limits import num_returned_tokens, value_of
from rl.config.signatures import did_you_mean


def divergence_problems(config: Config, learned: Learned) -> Iterator[str]:
    kl = config["kl"]
    estimator, place = kl["estimator"].get("_target_"), kl["place"]
    if kl["beta"] == 0:
        if kl["target_kl"] is not None:
            yield f"kl.target_kl={kl['target_kl']} scales kl.beta, which is 0: set kl.beta=0.05"
        return
    if place == "loss" and learned.divergence_is_linear:
        yield (
            f"kl.place=loss with {estimator} has no effect, because the mean of its gradient is "
            "zero: use kl.place=reward, or kl=k3"
        )
    if place == "reward" and not learned.divergence_is_linear:
        yield f"kl.place=reward with {estimator} has a biased gradient: use kl=k1"
    if place == "reward" and not learned.reads_advantages:
        loss = config["loss"]["_target_"]
        yield f"kl.place=reward changes advantages, but {loss} reads none: use kl=k3"
    if place == "reward" and value_of(config, "reward.normalise_each"):
        yield (
            "kl.place=reward lowers the sum of the rewards, but reward.normalise_each=true treats "
            "each reward separately: use kl=k3, or reward.normalise_each=false"
        )


def unused_or_missing_reference_problems(config: Config, learned: Learned) -> Iterator[str]:
    node, loss = config["reference"], config["loss"]["_target_"]
    kind, teaches = node["_target_"], learned.reads(REFERENCE)
    exists, is_policy = fact(kind, "has_logprobs", True), fact(kind, "is_policy", False)
    if not teaches and not config["kl"]["beta"] > 0:
        if (exists and not is_policy) or node.get("refresh_every") or node.get("sees_hint"):
            yield (
                f"neither {loss} nor a KL penalty uses {kind}: set kl.beta=0.01, use loss=distill "
                "to learn from this teacher, or use reference=none"
            )
    elif not exists:
        reader = loss if teaches else f"kl.beta={config['kl']['beta']}"
        remedy = "model reference.path=<the teacher>" if teaches else "initial"
        yield f"{reader} needs a reference model: use reference={remedy}"


def each_reference_problems(config: Config, learned: Learned) -> Iterator[str]:
    loss, temperature = config["loss"]["_target_"], value_of(config, "sampler.temperature")
    temperature = (config.get("schedules") or {}).get("sampler.temperature", temperature)
    for path, node in references(config).items():
        kind = node["_target_"]
        # With reference=per_env, the override +reference@<path>=<choice> sets a teacher.
        key = path if path == "reference" else f"+reference@{path}"
        if path != "reference" and not fact(kind, "has_logprobs", True):
            yield f"{path} is {kind}, which returns no logprobs: use {key}=model"
        is_hinted = node.get("sees_hint", False)
        may_be_policy = is_hinted or fact(loss, "stays_near_reference", False)
        if learned.reads(REFERENCE) and fact(kind, "is_policy", False) and not may_be_policy:
            yield (
                f"{loss} learns from a teacher, but {path}=initial is the policy before training: "
                f"use {key}=model {path}.path=<the teacher>, or {path}.sees_hint=true"
            )
        if node.get("refresh_every") and fact(config["adapter"]["_target_"], "freezes_base", False):
            yield (
                f"{path}.refresh_every={node['refresh_every']} cannot refresh the base model, "
                f"which an adapter freezes: set {path}.refresh_every=0, or use adapter=none"
            )
        if fact(kind, "only_temperature_1", False) and temperature not in (None, 1):
            yield (
                f"{path}=endpoint returns logprobs at temperature 1, but sampler.temperature="
                f"{temperature}: set sampler.temperature=1, or use {key}=model"
            )
        if fact(kind, "only_temperature_1", False) and num_returned_tokens(config["sampler"]):
            yield (
                f"{path}=endpoint normalises logprobs over all tokens, but with sampler.top_k="
                f"{config['sampler']['top_k']} the trainer needs them over the tokens that vLLM "
                f"kept: use {key}=model, or accept a bias with sampler.allow_biased_ratio=true"
            )
        if is_hinted and is_imitator(config["sampler"]["_target_"]):
            yield (
                f"{path}.sees_hint=true adds hints to prompts of sampled rollouts, but "
                f"{config['sampler']['_target_']} samples none: set {path}.sees_hint=false, or use "
                "sampler=async"
            )


def teacher_problems(config: Config, learned: Learned) -> Iterator[str]:
    if "teachers" not in config["reference"]:
        return
    teachers, members = config["reference"]["teachers"], value_of(config, "env.envs")
    if not isinstance(members, Mapping):
        yield (
            f"{config['reference']['_target_']} has a teacher for each environment of a mixture, "
            "but env is a single environment: use reference=model, or env=mixture"
        )
        return
    if missing := [name for name in members if name not in teachers]:
        yield (
            f"reference.teachers has no teacher for {' and for '.join(missing)} of env.envs: add "
            f"+reference@reference.teachers.{missing[0]}=model "
            f"reference.teachers.{missing[0]}.path=<its teacher>"
        )
    for name in (name for name in teachers if name not in members):
        hint = did_you_mean(name, members) or f": use {' or '.join(members)}"
        yield f"reference.teachers.{name} is not an environment of env.envs{hint}"
    numbers = {f"{path}.top_k={node.get('top_k')}" for path, node in references(config).items()}
    distinct = {number.rpartition("=")[2] for number in numbers}
    if len(distinct) > 1 and learned.reads_candidates:
        yield (
            f"{' and '.join(sorted(numbers))} differ, but the loss needs the same number of "
            "candidate tokens from each teacher: set equal values"
        )


REFERENCE_RULES = (
    *(unused_or_missing_reference_problems, each_reference_problems),
    *(teacher_problems, divergence_problems),
)
