"""Which reference goes with what reads it. A problem is one sentence.

Under reference=per_env each teacher is checked as if it were the only one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.facts import fact, is_imitator, references
from rl.config.learned import REFERENCE, Learned
from rl.config.limits import value_of
from rl.config.signatures import did_you_mean

Config = Mapping[str, Any]


def readers(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse a reference that nothing reads, and a missing one that something reads."""
    node, loss = config["reference"], config["loss"]["_target_"]
    kind, teaches = node["_target_"], learned.reads(REFERENCE)
    exists, is_policy = fact(kind, "has_logprobs", True), fact(kind, "is_policy", False)
    if not teaches and not config["kl"]["beta"] > 0:
        if (exists and not is_policy) or node.get("refresh_every") or node.get("sees_hint"):
            yield (
                f"nothing reads {kind}: add kl.beta=0.01, or loss=distill for a "
                "teacher, or leave reference out"
            )
    elif not exists:
        reader = loss if teaches else f"kl.beta={config['kl']['beta']}"
        remedy = "model reference.path=<the teacher>" if teaches else "initial"
        yield f"{reader} needs a reference and reference=none has none: use reference={remedy}"


def each_reference(config: Config, learned: Learned) -> Iterator[str]:
    """Compare what a run asks of each reference with what it can do."""
    loss, temperature = config["loss"]["_target_"], value_of(config, "sampler.temperature")
    for path, node in references(config).items():
        kind = node["_target_"]
        if path != "reference" and not fact(kind, "has_logprobs", True):
            yield f"{path} is {kind}, which returns no logprobs: name a teacher there"
        is_hinted = node.get("sees_hint", False)
        if learned.reads(REFERENCE) and fact(kind, "is_policy", False) and not is_hinted:
            yield (
                f"{loss} learns from a teacher, and {path}=initial is the policy itself: use "
                f"{path}=model {path}.path=<the teacher>, or {path}.sees_hint=true"
            )
        if node.get("refresh_every") and fact(config["adapter"]["_target_"], "freezes_base", False):
            yield (
                f"{path}.refresh_every={node['refresh_every']} moves the reference, which with "
                "adapter=lora is the frozen base: set it to 0, or use adapter=none"
            )
        if fact(kind, "only_temperature_1", False) and temperature not in (None, 1):
            yield (
                f"{path}=endpoint returns logprobs at temperature 1 and sampler.temperature="
                f"{temperature}: sample at 1, or load the teacher with {path}=model"
            )
        if is_hinted and is_imitator(config["sampler"]["_target_"]):
            yield (
                f"{path}.sees_hint=true needs prompts to put hints into, and "
                f"{config['sampler']['_target_']} samples nothing: leave it out, or choose "
                "sampler=async"
            )


def one_per_environment(config: Config, learned: Learned) -> Iterator[str]:
    """Require one teacher for each environment of the mixture, with equally many candidates."""
    if "teachers" not in config["reference"]:
        return
    teachers, members = config["reference"]["teachers"], value_of(config, "env.envs")
    if not isinstance(members, Mapping):
        yield (
            f"{config['reference']['_target_']} has a teacher for each environment of a mixture, "
            "and env is a single one: use reference=model, or env=mixture"
        )
        return
    if missing := [name for name in members if name not in teachers]:
        yield (
            f"reference.teachers has none for the environment {' nor for '.join(missing)}: add "
            f"+reference@reference.teachers.{missing[0]}=model "
            f"reference.teachers.{missing[0]}.path=<its teacher>"
        )
    for name in (name for name in teachers if name not in members):
        hint = did_you_mean(name, members) or f": it has {', '.join(members)}"
        yield f"reference.teachers.{name} is no environment of env.envs{hint}"
    numbers = {f"{path}.top_k={node.get('top_k')}" for path, node in references(config).items()}
    distinct = {number.rpartition("=")[2] for number in numbers}
    if len(distinct) > 1 and learned.compares_distributions:
        yield f"{' and '.join(sorted(numbers))} differ: one loss compares them, make them the same"


REFERENCE_RULES: tuple[Callable[[Config, Learned], Iterator[str]], ...] = (
    readers,
    each_reference,
    one_per_environment,
)
