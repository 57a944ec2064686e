"""Functions out of a configuration, given what the code supplies by name.

    def search(query: str, index: Index, *, limit: int) -> str: ...
               |           |               '- a knob, from YAML
               |           '- shared, found by its name
               '- from the policy, who sees nothing else of it

What stands before the `*` is supplied and what stands behind it comes from YAML, as everywhere.
"""

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from envs import threads
from envs.episode import Episode
from envs.tools import EPISODE, Function, ToolError

Objects = Callable[[], Mapping[str, Any]]
Reward = Callable[[Episode], Any]


class PartFailed(RuntimeError):
    """A tool or a reward raised; the message says which, and where."""


def supplied(function: Function) -> dict[str, inspect.Parameter]:
    """Return the parameters before the `*`."""
    parameters = inspect.signature(_inner(function)).parameters
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def bound_tool(function: Function, shared: Collection[str], objects: Objects) -> Function:
    """Return a tool as envs/tools.py wants it: shared objects and knobs are given, and unseen."""
    inner = _inner(function)
    if not inspect.isroutine(inner):
        raise ValueError(f"tools: {type(inner).__name__} is a class, and a tool is a function")
    shown = {
        name: parameter for name, parameter in supplied(function).items() if name not in shared
    }
    given = supplied(function).keys() - shown.keys()

    @wraps(inner)
    async def tool(**arguments: Any) -> Any:
        with _naming(f"the tool {inner.__name__}", inner):
            known = {name: objects()[name] for name in given}
            return await threads.call(function, **arguments, **known)

    # The schema that the policy reads is made from these: what is shared or a knob is not in it.
    tool.__signature__ = inspect.Signature([*shown.values()])  # pyright: ignore
    hints = inspect.get_annotations(inner)
    tool.__annotations__ = {name: hints[name] for name in shown if name in hints}
    return tool


def bound_reward(
    name: str, function: Function, shared: Collection[str], objects: Objects
) -> Reward:
    """Return a reward that wants nothing but the episode.

    Raises:
        ValueError: it takes something that is neither the episode nor shared.

    """
    parameters = supplied(function)
    given = [parameter for parameter in parameters if parameter in shared]
    for parameter, declared in parameters.items():
        if parameter not in (EPISODE, *shared) and declared.default is declared.empty:
            raise ValueError(
                f"rewards.{name} takes {parameter!r}, which is neither the episode nor shared "
                f"({', '.join(shared) or 'nothing is'}): add it to shared, or put it behind a *, "
                "where YAML sets it"
            )

    async def reward(episode: Episode) -> Any:
        with _naming(f"the reward {name}", _inner(function)):
            known = {parameter: objects()[parameter] for parameter in given}
            if EPISODE in parameters:
                known[EPISODE] = episode
            return await threads.call(function, **known)

    return reward


def _inner(function: Function) -> Function:
    return function.func if isinstance(function, partial) else function


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
