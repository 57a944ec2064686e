"""One of our environments by the name of its YAML file, for programs that are no run of ours.

load("reverse-text", max_length=8)    conf/env/reverse-text.yaml with one knob changed
load("my_package.MyEnv", size=3)      a class of yours with all its knobs
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from envs.protocol import Environment

CONF = Path(__file__).parents[1] / "conf"
# What an environment's YAML asks of the model: a full-grown one, which is told of the tools.
MODEL = ("model=hf", "model.path=unknown")


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
    """The environment's node as a run would have it."""
    if not (CONF / "env" / f"{name}.yaml").exists():
        names = [path.stem for path in sorted((CONF / "env").glob("*.yaml"))]
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
        raise ValueError(f"there is no environment {name!r}: {hint}")
    with initialize_config_dir(str(CONF), version_base=None):
        chosen = compose("train", [f"env={name}", *MODEL]).env
    node = OmegaConf.to_container(chosen, resolve=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def _built(value: Any, path: str) -> Any:
    """The value with its nodes built: classes as instances, functions with their knobs."""
    if value == "???":
        raise ValueError(f"{path} has no value yet: give it one")
    if isinstance(value, list):
        return [_built(item, f"{path}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    knobs = {k: _built(v, f"{path}.{k}") for k, v in value.items() if k != "_target_"}
    if "_target_" not in value:
        return knobs
    module, _, name = value["_target_"].rpartition(".")
    target = getattr(import_module(module), name)
    if not isinstance(target, type):
        return partial(target, **knobs)
    # What every environment takes besides its constructor's own (Environment.configure).
    common = _parameters(getattr(target, "configure", None)) - _parameters(target)
    settings = {name: knobs.pop(name) for name in common & knobs.keys()}
    made = target(**knobs)
    if settings:
        made.configure(**settings)
    return made


def _parameters(function: Callable[..., Any] | None) -> set[str]:
    return set(signature(function).parameters) - {"self"} if function else set()
