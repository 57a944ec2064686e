"""Whether a run's configuration is right: its keys, their values, the nodes and what is in them.

The callable's signature is the schema. A node is a mapping with `_target_`, which names one of our
callables; its other keys are that callable's keyword-only parameters (rl/config/signatures.py):

    loss:
      _target_: losses.cispo.cispo        def cispo(tokens, *, clip_low: float, clip_high: float)
      clip_low: 0.0
      clip_high: 5.0                      build.py makes partial(cispo, clip_low=0.0, clip_high=5.0)
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.annotations import Converter, Misfit, Node
from rl.config.limits import free_form_problems
from rl.config.rules import rule_problems
from rl.config.schema import ConfigError, parsed
from rl.config.signatures import Knob, did_you_mean, read

MISSING = "???"


def check(
    config: Mapping[str, Any],
    schema: str = "rl.config.schema.Run",
    rules: Callable[[Mapping[str, Any]], list[str]] = rule_problems,
    *,
    choices: Mapping[str, str] | None = None,
) -> None:
    """Raise ConfigError with everything that is wrong with a resolved configuration.

    Keys, types and targets first; what the keys mean together (rules.py) once those are right.

    Args:
        config: its top level.
        schema: the class that says which keys there are.
        rules: what they mean together.
        choices: which file of each group was chosen: the names that the user knows the nodes by.

    """
    with parsed():
        problems = list(_node_problems({"_target_": schema, **config}, ""))
        problems += free_form_problems(config)
        if not problems:
            problems = rules(config)
    if problems:
        names = _names_of(config, choices or {})
        problems = [_in_the_words_of_the_user(problem, names) for problem in problems]
        raise ConfigError(list(dict.fromkeys(problems)))  # one path may be looked at twice


def _names_of(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, str]:
    """`losses.gspo.gspo`: `loss=gspo`, for each node that a file was chosen for."""
    nodes = {group: config.get(group) for group in choices}
    return {
        str(node["_target_"]): f"{group}={choices[group]}"
        for group, node in nodes.items()
        if isinstance(node, Mapping) and "_target_" in node
    }


def _in_the_words_of_the_user(problem: str, names: Mapping[str, str]) -> str:
    """The sentence with targets replaced by choices, unless it is about a target."""
    if "._target_ is " in problem:
        return problem
    for target, name in names.items():
        problem = re.sub(rf"(?<![\w.]){re.escape(target)}(?!\.?\w)", name, problem)
    return problem


def _node_problems(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """What is wrong with a node and the nodes in it; the whole configuration has the path ""."""
    target = node["_target_"]
    try:
        signature = read(str(target))
    except LookupError as error:
        yield f"{path}._target_ is {target}, but {error.args[0]}"
        return
    prefix, owner = (f"{path}.", target) if path else ("", "a run")
    missing = [k for k, knob in signature.knobs.items() if knob.required and k not in node]
    for key in node:
        if key == "_target_" or key in signature.knobs:
            continue
        hint = did_you_mean(str(key), signature.knobs)
        missing = [name for name in missing if not hint.endswith(f" {name}?")]
        if key in signature.positional:
            hint = ": the code supplies it, so leave it out"
        known = f": it has {', '.join(signature.knobs) or 'none'}"
        yield f"{prefix}{key} is no key of {owner}{hint or known}"
    for key in missing:
        kind = signature.knobs[key].annotation
        if not path and isinstance(kind, ast.Name) and kind.id == "Node":
            yield f"{key} is missing: choose one with {key}=<name of a file in conf/{key}>"
        else:
            yield f"{prefix}{key} is missing: add it to the YAML that sets {path or 'the run'}"
    for key, knob in signature.knobs.items():
        if key in node:
            yield from _value_problems(node[key], knob, f"{prefix}{key}")


def _value_problems(value: Any, knob: Knob, path: str) -> Iterator[str]:
    """What is wrong with one value, nested nodes included."""
    if value == MISSING:
        yield f"{path} has no value yet: give it one, {path}=..."
        return
    problems: list[str] = []

    def descend(node: Node, where: str) -> Node:
        problems.extend(_node_problems(node, where))
        return node

    try:
        Converter(knob.module, descend).convert(value, knob.annotation, path)
    except Misfit as misfit:
        problems.append(f"{path} {misfit}")
    yield from problems
