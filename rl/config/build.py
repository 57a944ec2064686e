"""Build callables and objects from the nodes of a configuration."""

from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from envs.user_code import find_location
from rl.config.annotations import convert
from rl.config.schedules import Schedules
from rl.config.schema import ConfigError
from rl.config.signatures import options_of, spec_of


def build(node: Mapping[str, Any]) -> partial[Any]:
    """Return the node's function or class with the node's options bound.

    Nested nodes are built first. The caller adds positional arguments. If some options are
    parameters of the class's method `configure`, the returned callable creates an instance and
    calls its `configure` with these options. Raise ValueError for a wrong option or failed import.
    """
    target = str(node["_target_"])
    known = options_of(target)
    if unknown := node.keys() - known.keys() - {"_target_"}:
        raise ConfigError([f"{target}.{k} is not an option: remove it" for k in sorted(unknown)])
    options = {
        key: convert(value, known[key], f"{target}.{key}", lambda node, _: component(node))
        for key, value in node.items()
        if key != "_target_"
    }
    module, _, name = target.rpartition(".")
    made = getattr(_import_target(module, target), name)
    settings = {key: options.pop(key) for key in [*options] if known[key].configured}
    bound = partial(create_configured, made, settings) if settings else made
    return partial(bound, **options)


def create_configured(cls: Any, settings: dict[str, Any], /, **options: Any) -> Any:
    instance = cls(**options)
    instance.configure(**settings)
    return instance


def _import_target(module: str, target: str) -> ModuleType:
    try:
        return import_module(module)
    except Exception as error:  # a user's module may raise any exception
        spec = spec_of(module)
        file, line = find_location(error, spec and spec.origin) or (module, 1)
        raise ValueError(
            f"{target} cannot be imported: {type(error).__name__}: {error} ({file}:{line})"
        ) from error


def component(node: Mapping[str, Any]) -> Any:
    """Return the node's function with its options bound, or an instance of the node's class."""
    made = build(node)
    return made() if isinstance(made.func, type) or made.func is create_configured else made


def construct(run: Any, groups: Iterable[str]) -> None:
    """Construct each group's component. Raise ConfigError if one is invalid or unusable."""
    problems: list[str] = []
    schedules = Schedules.of(vars(run))
    for group in groups:
        try:
            if (node := getattr(run, group)) is not None:
                made = schedules.apply(build(node)(), group, 0)
                if group == "env":
                    made.check_machine()
        except Exception as error:  # noqa: BLE001 a component may be user code and raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problems.append(f"{group}: {kind}{error}")
    if problems:
        raise ConfigError(problems)
