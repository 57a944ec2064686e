"""Which reference goes with what reads it: refused in one sentence, or allowed."""

from typing import Any

import pytest

from rl.config.facts import sees_hint
from tests.support.composing import Changes, changed, check_all, chosen, composed, only_problem

MODEL = {**chosen("reference", "model"), "path": "some/teacher", "dtype": "bfloat16"}
ENDPOINT = {**chosen("reference", "endpoint"), "url": "http://there/v1", "model": "t"}
INITIAL = chosen("reference", "initial")
MIXTURE = composed("env=mixture")["env"]
FORWARD = {"loss": chosen("loss", "forward_kl_topk"), "reference": MODEL}
REVERSE = {"loss": chosen("loss", "reverse_kl_topk"), "reference": MODEL}
DISTILL = {"loss": chosen("loss", "distill"), "reference": MODEL}
DEMONSTRATIONS = {
    "sampler": chosen("sampler", "demonstrations"),
    "advantage": chosen("advantage", "none"),
}


def several(loss: str = "distill", **teachers: Any) -> Changes:
    """A mixture of reverse-text and arithmetic; `reverse` stands for the former."""
    names = {"reverse": "reverse-text"}
    node = chosen("reference", "per_env")
    node["teachers"] = {names.get(name, name): teacher for name, teacher in teachers.items()}
    return {"loss": chosen("loss", loss), "env": MIXTURE, "reference": node}


BOTH = several(reverse=MODEL, arithmetic=ENDPOINT)

REFUSED: dict[str, tuple[Changes, str]] = {
    "the policy as its own teacher": (
        {**FORWARD, "reference": INITIAL},
        "learns from a teacher, and reference=initial is the policy itself: use reference=model "
        "reference.path=<the teacher>, or reference.sees_hint=true",
    ),
    "candidates of no teacher": (
        {**REVERSE, "reference": chosen("reference", "none")},
        "reverse_kl_topk needs a reference and reference=none has none: use reference=model",
    ),
    "hints for nobody": (
        {"reference": {**INITIAL, "sees_hint": True}},
        "nothing reads rl.learner.reference.local.InitialPolicy: add kl.beta=0.01, or",
    ),
    "hints in demonstrations": (
        {**FORWARD, **DEMONSTRATIONS, "reference": {**MODEL, "sees_hint": True}},
        "reference.sees_hint=true needs prompts to put hints into, and "
        "rl.sampling.demonstrations.DemonstrationSampler samples nothing: leave it out, or",
    ),
    "no candidates": ({**FORWARD, "reference.top_k": 0}, "reference.top_k=0, but it must be >= 1"),
    "a negative retry": (
        {**DISTILL, "reference": {**ENDPOINT, "max_retries": -1}},
        "reference.max_retries=-1, but it must be >= 0",
    ),
    "all of it the policy": (
        {**FORWARD, "loss": {**chosen("loss", "jsd_topk"), "mix": 0.0}},
        "loss.mix=0.0, but it must be > 0",
    ),
    "teachers without a mixture": (
        {**BOTH, "env": composed("env=arithmetic")["env"]},
        "rl.learner.reference.per_env.PerEnvironment has a teacher for each environment of a "
        "mixture, and env is a single one: use reference=model, or env=mixture",
    ),
    "an environment without a teacher": (
        several(reverse=MODEL),
        "reference.teachers has none for the environment arithmetic: add "
        "+reference@reference.teachers.arithmetic=model "
        "reference.teachers.arithmetic.path=<its teacher>",
    ),
    "no teacher at all": (several(), "none for the environment reverse-text nor for arithmetic"),
    "a teacher without an environment": (
        several(reverse=MODEL, arithmetic=MODEL, arithmetics=MODEL),
        "reference.teachers.arithmetics is no environment of env.envs: did you mean arithmetic?",
    ),
    "different numbers of candidates": (
        several("forward_kl_topk", reverse=MODEL, arithmetic={**MODEL, "top_k": 4}),
        "reference.teachers.arithmetic.top_k=4 and reference.teachers.reverse-text.top_k=16 "
        "differ: one loss compares them, make them the same",
    ),
    "one of them at another temperature": (
        {**BOTH, "sampler.temperature": 0.7},
        "reference.teachers.arithmetic=endpoint returns logprobs at temperature 1 and "
        "sampler.temperature=0.7: sample at 1, or load",
    ),
    "one of them out of range": (
        several(reverse=MODEL, arithmetic={**ENDPOINT, "timeout": 0.0}),
        "reference.teachers.arithmetic.timeout=0.0, but it must be > 0",
    ),
    "one of them the policy": (
        several(reverse=MODEL, arithmetic=INITIAL),
        "reference.teachers.arithmetic=initial is the policy itself",
    ),
    "one of them nobody": (
        several(reverse=MODEL, arithmetic=chosen("reference", "none")),
        "reference.teachers.arithmetic is rl.learner.reference.protocol.NoReference, which returns",
    ),
    "one of them not there": (
        several(reverse=MODEL, arithmetic={**MODEL, "path": "/no/where"}),
        "reference.teachers.arithmetic.path=/no/where: no such folder",
    ),
}

ALLOWED: dict[str, Changes] = {
    "all that a teacher might say": FORWARD,
    "nothing that it would not": REVERSE,
    "candidates of demonstrations": {**FORWARD, **DEMONSTRATIONS},
    "candidates in several updates": {**REVERSE, "updates_per_batch": 2},
    "candidates of truncated sampling": {**REVERSE, "sampler.top_p": 0.9},
    "candidates of a server": {**FORWARD, "reference": ENDPOINT},
    "a teacher with hints": {**DISTILL, "reference": {**MODEL, "sees_hint": True}},
    "the policy with hints": {**REVERSE, "reference": {**INITIAL, "sees_hint": True}},
    "a teacher for each": BOTH,
    "hints for one of them": several(reverse={**INITIAL, "sees_hint": True}, arithmetic=MODEL),
    "different numbers that nobody reads": several(reverse=MODEL, arithmetic={**MODEL, "top_k": 4}),
    "a divergence for each": {
        "kl.beta": 0.01,
        **{k: v for k, v in BOTH.items() if k != "loss"},
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reference_that_does_not_fit_is_refused_in_one_sentence(
    name: str, config: dict[str, Any]
) -> None:
    changes, said = REFUSED[name]
    problem = only_problem(changed(config, changes))
    assert said in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_a_reference_that_fits_is_allowed(name: str, config: dict[str, Any]) -> None:
    check_all(changed(config, ALLOWED[name]))


def test_who_sees_hints_is_said_by_environment_and_only_where_somebody_reads(
    config: dict[str, Any],
) -> None:
    mixed = changed(config, ALLOWED["hints for one of them"])
    assert sees_hint(mixed, "reverse-text")
    assert not sees_hint(mixed, "arithmetic")
    alone = changed(config, ALLOWED["a teacher with hints"])
    assert sees_hint(alone, "whatever it is called")
    assert not sees_hint(config, "arithmetic")


def test_teachers_may_be_named_on_the_command_line(tmp_path: Any) -> None:
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
    teachers = config["reference"]["teachers"]
    assert [t["_target_"].rpartition(".")[2] for t in teachers.values()] == [
        "FrozenModel",
        "Endpoint",
    ]
