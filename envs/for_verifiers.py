"""One of our environments by the name of its YAML file, for libraries that have no Hydra.

load("reverse-text", max_length=8)    conf/env/reverse-text.yaml with one knob changed
load("my_package.MyEnv", size=3)      a class of yours with all its knobs
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from envs.protocol import Environment

CONF = Path(__file__).parents[1] / "conf" / "env"


def load(name: str, **knobs: Any) -> Environment:
    """Return the environment.

    Raises:
        ValueError: there is no such environment or knob, or a knob has no value here.

    """
    node = {"_target_": name} if "." in name else _node(name)
    if unknown := sorted(set(knobs) - set(node)) if "." not in name else []:
        raise ValueError(f"{name} has no knobs {unknown}: it has {', '.join(list(node)[1:])}")
    return _built({**node, **knobs}, name)


def _node(name: str) -> dict[str, Any]:
    """The YAML file's node on top of those of the same group that it starts from."""
    file = CONF / f"{name}.yaml"
    if not file.exists():
        names = [path.stem for path in sorted(CONF.glob("*.yaml"))]
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
        raise ValueError(f"there is no environment {name!r}: {hint}")
    node = yaml.safe_load(file.read_text())
    bases = [base for base in node.pop("defaults", []) if isinstance(base, str)]
    below: dict[str, Any] = {}
    for base in bases:
        if base != "_self_":
            below |= _node(base)
    return {**below, **node}


def _built(value: Any, path: str) -> Any:
    """The value with its nodes built: classes as instances, functions with their knobs."""
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ValueError(f"{path} has no value outside a run ({value}): give it one")
    if isinstance(value, list):
        return [_built(item, f"{path}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    knobs = {k: _built(v, f"{path}.{k}") for k, v in value.items() if k != "_target_"}
    if "_target_" not in value:
        return knobs
    module, _, name = value["_target_"].rpartition(".")
    target = getattr(import_module(module), name)
    return target(**knobs) if isinstance(target, type) else partial(target, **knobs)
