"""Check a run's configuration: its keys, their values, and nested nodes.

A node is a mapping with `_target_`, which names a function or class. The signature of this function
or class is the schema of the node: the node's other keys are the keyword-only parameters
(rl/config/signatures.py).

    loss:
      _target_: losses.cispo.cispo        def cispo(tokens, *, clip_low: float, clip_high: float)
      clip_low: 0.0
      clip_high: 5.0                      build.py makes partial(cispo, clip_low=0.0, clip_high=5.0)
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from rl.config.algorithm_rules import ALGORITHM_RULES
from rl.config.annotations import InvalidValue, Node, convert, has_target
from rl.config.learned import Learned
from rl.config.limits import bounds_problems
from rl.config.rules import RULES, Rule
from rl.config.schedules import SCHEDULED, configs_at_extremes, schedule_nodes
from rl.config.schema import ConfigError, Run, Settings, as_config_error
from rl.config.signatures import Options, did_you_mean, options_of

MISSING = "???"


def check(
    config: Mapping[str, Any],
    schema: type[Settings] = Run,
    rules: Iterable[Rule] = RULES,
) -> None:
    """Raise ConfigError with all problems of a configuration.

    First check keys, types, targets and ranges. If all are valid, check combinations with `rules`.
    The fields of the class `schema` are the top-level keys. A configuration with schedules is
    checked at the steps at which a schedule is smallest or largest.
    """
    target = f"{schema.__module__}.{schema.__name__}"
    with as_config_error():
        _raise_problems(list(_schedule_problems(config)))
        found = {
            when: list(_node_problems({"_target_": target, **values}, ""))
            or list(_typed_node_problems(values, schema))
            or [problem for rule in rules for problem in rule(values)]
            for when, values in configs_at_extremes(config)
        }
        # If a problem occurs at all checked steps, report it once and without a step.
        always = [p for p in next(iter(found.values())) if all(p in ps for ps in found.values())]
        steps = [when + p for when, ps in found.items() for p in ps if p not in always]
        _raise_problems([*always, *steps])


def check_learned(config: Mapping[str, Any], learned: Learned) -> None:
    """Raise ConfigError if `learned` shows that components cannot be combined."""
    _raise_problems([p for rule in ALGORITHM_RULES for p in rule(config, learned)])


def _schedule_problems(config: Mapping[str, Any]) -> Iterator[str]:
    for path, node in schedule_nodes(config):
        if not any(fnmatchcase(path, p) and path.count(".") < 2 for p in SCHEDULED):
            yield f"{path} cannot be a schedule, but {', '.join(SCHEDULED)} can: set a number"
        elif "max_steps" not in config:
            yield f"{path} is a schedule, but this program does not train: set a number"
        elif problems := list(_node_problems(node, path)):
            yield from problems
        elif path == "kl.beta" and config["kl"].get("target_kl") is not None:
            yield "kl.beta is a schedule, but kl.target_kl adapts it: set kl.target_kl=null"


def _raise_problems(problems: list[str]) -> None:
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))  # two checks may report the same problem


def _node_problems(node: Mapping[str, Any], path: str) -> Iterator[str]:
    target = node["_target_"]
    try:
        options = options_of(str(target))
    except LookupError as error:
        yield f"{path}._target_ is {target}, but {error.args[0]}"
        return
    yield from _key_problems(node, options, path)
    problems: list[str] = []

    def collect_problems(node: Node, where: str) -> Node:
        problems.extend(_node_problems(node, where))
        return node

    for key in (key for key in options if key in node):
        where = f"{path}.{key}" if path else key
        try:
            if node[key] == MISSING:
                raise InvalidValue(f"{where} has no value: set {where}=...")
            convert(node[key], options[key], where, collect_problems)
        except InvalidValue as misfit:
            # If the value is a node, such as a schedule, report the node's own problems instead.
            inner = _node_problems(node[key], where) if has_target(node[key]) else ()
            problems += list(inner) or [str(misfit)]
    yield from problems or bounds_problems(node, path)


def _typed_node_problems(config: Mapping[str, Any], schema: type[Settings]) -> Iterator[str]:
    """Yield a problem per node in which a key that rl/ reads is missing or has a wrong type."""
    for key, kind in schema.TYPED.items():
        try:
            _ = config[key] and kind.of(config[key])
        except msgspec.ValidationError as error:
            target = config[key]["_target_"]
            yield f"{key} does not fit a run: {error}. Add or change this option of {target}"


def _key_problems(node: Mapping[str, Any], options: Options, path: str) -> Iterator[str]:
    prefix, owner = (f"{path}.", node["_target_"]) if path else ("", "a run")
    missing = [k for k, option in options.items() if option.required and k not in node]
    for key in node:
        if key == "_target_" or key in options:
            continue
        hint = did_you_mean(str(key), options)
        missing = [name for name in missing if not hint.endswith(f" {name}?")]
        known = f": it has {', '.join(options) or 'none, because no parameter follows a *'}"
        yield f"{prefix}{key} is not a key of {owner}{hint or known}"
    for key in missing:
        kind = options[key].annotation
        if not path and isinstance(kind, ast.Name) and kind.id == "Node":
            yield f"{key} is missing: choose one with {key}=<name of a file in conf/{key}>"
        else:
            yield f"{prefix}{key} is missing: add it to the YAML of {path or 'the run'}"
