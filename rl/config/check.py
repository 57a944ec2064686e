"""Check a run's configuration: its keys, their values, and nested nodes.

The callable's signature is the schema. A node is a mapping with `_target_`, which names one of our
callables; its other keys are that callable's keyword-only parameters (rl/config/signatures.py):

    loss:
      _target_: losses.cispo.cispo        def cispo(tokens, *, clip_low: float, clip_high: float)
      clip_low: 0.0
      clip_high: 5.0                      build.py makes partial(cispo, clip_low=0.0, clip_high=5.0)
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.algorithm_rules import ALGORITHM_RULES
from rl.config.annotations import Misfit, Node, converted
from rl.config.learned import Learned
from rl.config.limits import order_problems
from rl.config.rules import rule_problems
from rl.config.schema import RENAMED, ConfigError, parsed
from rl.config.signatures import Options, did_you_mean, read

MISSING = "???"


def check(
    config: Mapping[str, Any],
    schema: str = "rl.config.schema.Run",
    rules: Callable[[Mapping[str, Any]], list[str]] = rule_problems,
) -> None:
    """Raise ConfigError with everything that is wrong with the values of a configuration.

    Keys, types, targets and ranges first; combinations of values (rules.py) if those are right.

    Args:
        config: its top level, resolved.
        schema: the class whose fields are the keys.
        rules: returns a sentence for each combination that makes no sense.

    """
    with parsed():
        problems = list(_node_problems({"_target_": schema, **config}, ""))
        _refuse(problems or rules(config))


def check_learned(config: Mapping[str, Any], learned: Learned) -> None:
    """Raise ConfigError if a checked configuration composes what does not go together."""
    _refuse([p for rule in ALGORITHM_RULES for p in rule(config, learned)])


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # one path may be looked at twice


def _node_problems(node: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield what is wrong with a node and the nodes in it; the top level has the path ""."""
    target = node["_target_"]
    try:
        options = read(str(target))
    except LookupError as error:
        yield f"{path}._target_ is {target}, but {error.args[0]}"
        return
    yield from _key_problems(node, options, path)
    problems: list[str] = []

    def descend(node: Node, where: str) -> Node:
        problems.extend(_node_problems(node, where))
        return node

    for key in (key for key in options if key in node):
        where = f"{path}.{key}" if path else key
        try:
            if node[key] == MISSING:
                raise Misfit(f"{where} has no value yet: give it one, {where}=...")
            converted(node[key], options[key], where, descend)
        except Misfit as misfit:
            problems.append(str(misfit))
    yield from problems or order_problems(node, path)


def _key_problems(node: Mapping[str, Any], options: Options, path: str) -> Iterator[str]:
    """Yield a sentence for each key that the target does not take, and each that it misses."""
    prefix, owner = (f"{path}.", node["_target_"]) if path else ("", "a run")
    missing = [k for k, option in options.items() if option.required and k not in node]
    for key in node:
        if key == "_target_" or key in options:
            continue
        hint = did_you_mean(str(key), options)
        missing = [name for name in missing if not hint.endswith(f" {name}?")]
        known = f": it has {', '.join(options) or 'none'}"
        if new := RENAMED.get(f"{prefix}{key}"):
            missing = [name for name in missing if f"{prefix}{name}" != new]
            hint = f": renamed to {new}"
        yield f"{prefix}{key} is no key of {owner}{hint or known}"
    for key in missing:
        kind = options[key].annotation
        if not path and isinstance(kind, ast.Name) and kind.id == "Node":
            yield f"{key} is missing: choose one with {key}=<name of a file in conf/{key}>"
        else:
            yield f"{prefix}{key} is missing: add it to the YAML that sets {path or 'the run'}"
