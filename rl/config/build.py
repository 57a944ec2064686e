"""How the nodes of a configuration become callables and objects."""

from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from traceback import extract_tb
from types import ModuleType
from typing import Any

from rl.config.annotations import Converter, Misfit, Node
from rl.config.schema import ConfigError
from rl.config.signatures import Knob, read

# What is called late, on a resume for one, and what has all of it: a part of one's own is looked at
# before anything starts.
_CALLED = {
    "order": (
        "rl.rollouts.example_order.ExampleOrder",
        ("begin", "next", "example", "observe", "state", "load", "metrics"),
    ),
    "buffer": ("rl.rollouts.buffer.FifoBuffer", ("add", "draw", "state", "load")),
}


def build(node: Mapping[str, Any]) -> partial[Any]:
    """The node's callable with its knobs; the caller passes what the code supplies.

    Nested nodes are built first; where they name a class, the knob gets an instance of it. What a
    class takes in `configure` it is given there, right after its constructor.
    """
    target = str(node["_target_"])
    signature = read(target)
    knobs = {
        key: _converted(value, signature.knobs.get(key), f"{target}.{key}")
        for key, value in node.items()
        if key != "_target_"
    }
    module, _, name = target.rpartition(".")
    made = getattr(_imported(module, target), name)
    settings = {key: knobs.pop(key) for key in signature.configured & knobs.keys()}
    return partial(_configured, made, settings, **knobs) if settings else partial(made, **knobs)


def _configured(made: Any, settings: dict[str, Any], /, **knobs: Any) -> Any:
    part = made(**knobs)
    part.configure(**settings)
    return part


def _imported(name: str, target: str) -> ModuleType:
    """Import a module; what it raises becomes one line that says where.

    Raises:
        ValueError: it raised; a part that starts late has nothing but this to say.

    """
    try:
        return import_module(name)
    except Exception as error:  # a user's module may raise anything
        frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith("<")]
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        if isinstance(error, SyntaxError):  # whose place is no frame
            where = f"{error.filename}:{error.lineno}"
        raise ValueError(
            f"{target} cannot be imported: {type(error).__name__}: {error} ({where})"
        ) from error


def _converted(value: Any, knob: Knob | None, path: str) -> Any:
    if knob is None:
        raise ConfigError([f"{path} is not a knob"])
    try:
        return Converter(knob.module, _built).convert(value, knob.annotation, path)
    except Misfit as misfit:
        raise ConfigError([f"{path} {misfit}"]) from None


def _built(node: Node, _path: str) -> Any:
    made = build(node)
    return made() if read(node["_target_"]).is_class else made


def construct(run: Any, groups: Iterable[str]) -> None:
    """Build the nodes of these groups, those that are there, and drop them; they are cheap.

    An environment is asked as well whether this machine can play it.

    Raises:
        ConfigError: what every constructor had to say.

    """
    problems: list[str] = []
    for group in groups:
        try:
            if (node := getattr(run, group)) is not None:
                part = build(node)()
                _require_methods(part, group, node)
                if group == "env":
                    part.check_machine()
        except Exception as error:  # noqa: BLE001 an environment is user code and may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problems.append(f"{group}: {kind}{error}")
    if problems:
        raise ConfigError(problems)


def _require_methods(part: object, group: str, node: Node) -> None:
    base, methods = _CALLED.get(group, ("", ()))
    if lacking := [name for name in methods if not callable(getattr(part, name, None))]:
        names = " and no ".join(f"{name}()" for name in lacking)
        raise ValueError(f"{node['_target_']} has no {names}: derive it from {base}")
