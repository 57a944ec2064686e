"""Functions out of a configuration, given what the code supplies by name.

    def search(query: str, index: Index, *, limit: int) -> str: ...
               |           |               '- a knob, from YAML
               |           '- an object, found by its name or by a binding (envs/objects.py)
               '- from the policy, who sees nothing else of it

What stands before the `*` is supplied and what stands behind it comes from YAML, as everywhere.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from envs import threads
from envs.episode import Episode
from envs.objects import Objects
from envs.tools import EPISODE, Function, ToolError, supplied, unwrapped

Reward = Callable[[Episode], Any]


class PartFailed(RuntimeError):
    """A tool or a reward raised; the message says which, and where."""


def bindings_of(
    name: str, function: Function, bindings: Mapping[str, str], objects: Objects
) -> dict[str, str]:
    """Return which object each parameter gets: what `bindings` says, else that of its name.

    Args:
        name: of the tool or the reward, as `bindings` knows it.

    """
    parameters = supplied(function)
    given = {p: bindings.get(f"{name}.{p}", p) for p in parameters}
    return {parameter: known for parameter, known in given.items() if known in objects.names}


def check_bindings(
    bindings: Mapping[str, str], functions: Iterable[tuple[str, Function]], objects: Objects
) -> None:
    """Raise ValueError, one sentence, where a binding binds nothing to nothing."""
    targets = [f"{name}.{p}" for name, part in functions for p in supplied(part)]
    for target, name in bindings.items():
        if target not in targets:
            raise ValueError(
                f"bindings names {target}, which is no parameter of a tool or a reward: there are "
                f"{', '.join(targets) or 'none'}"
            )
        if name not in objects.names:
            raise ValueError(
                f"bindings.{target}={name}, but there is no such object: shared and per_episode "
                f"have {', '.join(objects.names) or 'none'}"
            )


def bound_tool(function: Function, bindings: Mapping[str, str], objects: Objects) -> Function:
    """Return a tool as envs/tools.py wants it: objects and knobs are given, and unseen."""
    inner = unwrapped(function)
    if not inspect.isroutine(inner):
        raise ValueError(f"tools: {type(inner).__name__} is a class, and a tool is a function")
    given = bindings_of(inner.__name__, function, bindings, objects)
    shown = {name: p for name, p in supplied(function).items() if name not in given}
    takes_episode = EPISODE in shown

    @wraps(inner)
    async def tool(episode: Episode, **arguments: Any) -> Any:
        with _naming(f"the tool {inner.__name__}", inner):
            known = {name: await objects.get(value, episode) for name, value in given.items()}
            if takes_episode:
                known[EPISODE] = episode
            return await threads.call(function, **arguments, **known)

    # The schema that the policy reads is made from these: what is shared or a knob is not in it.
    episode = inspect.Parameter(EPISODE, inspect.Parameter.KEYWORD_ONLY)
    seen = [p for name, p in shown.items() if name != EPISODE]
    tool.__signature__ = inspect.Signature([*seen, episode])  # pyright: ignore
    hints = inspect.get_annotations(inner)
    tool.__annotations__ = {name: hints[name] for name in shown if name in hints}
    return tool


def bound_reward(
    name: str, function: Function, bindings: Mapping[str, str], objects: Objects
) -> Reward:
    """Return a reward that wants nothing but the episode.

    Raises:
        ValueError: it takes something that is neither the episode nor an object.

    """
    parameters = supplied(function)
    given = bindings_of(name, function, bindings, objects)
    for parameter, declared in parameters.items():
        if parameter not in (EPISODE, *given) and declared.default is declared.empty:
            raise ValueError(
                f"rewards.{name} takes {parameter!r}, which is neither the episode nor shared "
                f"({', '.join(objects.names) or 'nothing is'}): add it to shared, or put it behind "
                "a *, where YAML sets it"
            )

    async def reward(episode: Episode) -> Any:
        with _naming(f"the reward {name}", unwrapped(function)):
            known = {key: await objects.get(value, episode) for key, value in given.items()}
            if EPISODE in parameters:
                known[EPISODE] = episode
            return await threads.call(function, **known)

    return reward


@contextmanager
def _naming(what: str, function: Function) -> Iterator[None]:
    """Say which part failed, and on which line of its own file."""
    try:
        yield
    except ToolError:
        raise
    except Exception as error:  # user code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        source = getattr(sys.modules.get(function.__module__), "__file__", None)
        place = ([frame for frame in frames if frame.filename == source] or frames)[-1]
        raise PartFailed(
            f"{what}: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        ) from error
