"""Pass configured objects to tools and rewards, as arguments for parameters of the same name.

    def search(query: str, index: Index, *, limit: int) -> str: ...
               |           |               '- an option, from YAML
               |           '- an object, found by its name or by a binding
               '- an argument from the policy; the tool's schema has only this parameter

    shared:       {index: {_target_: my_package.load_index, path: index.json}}   made once per run
    per_episode:  {notes: {_target_: my_package.Notes}}                          made per episode

YAML sets the parameters after the `*`. The `_target_` of an object is a class, or a function that
returns the object. Each episode has its own `per_episode` objects: `Objects.get` calls a `_target_`
function once per episode (with `episode` if the function takes it), or copies a class's instance.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cached_property, partial, wraps
from typing import Any

from envs import threads
from envs.episode import Episode
from envs.tools import EPISODE, Function, ToolError, call_parameters, unwrap
from envs.user_code import format_location

Reward = Callable[[Episode], Any]
_MEMORY = "objects"  # key of Episode.memory for the `per_episode` objects


class Objects:
    """The named objects that tools and rewards receive as arguments."""

    def __init__(self, shared: Mapping[str, Any], per_episode: Mapping[str, Any]) -> None:
        self._shared, self._per_episode = dict(shared), dict(per_episode)
        self.names = [*shared, *per_episode]

    @cached_property
    def shared(self) -> dict[str, Any]:
        return {
            name: value() if isinstance(value, partial) else value
            for name, value in self._shared.items()
        }

    async def get(self, name: str, episode: Episode) -> Any:
        """Return the object called `name`. A per-episode object is created at its first use."""
        if name in self._shared:
            return self.shared[name]
        created: dict[str, Any] = episode.memory.setdefault(_MEMORY, {})
        if name not in created:
            value = self._per_episode[name]
            if isinstance(value, partial):
                arguments = [episode] if EPISODE in call_parameters(value) else []
                created[name] = await threads.call(value, *arguments)
            else:
                created[name] = deepcopy(value)
        return created[name]

    def close(self, episode: Episode) -> None:
        """Close the episode's objects, newest first, even if the `close` of one object raises."""
        with ExitStack() as stack:
            for value in episode.memory.pop(_MEMORY, {}).values():
                if callable(close := getattr(value, "close", None)):
                    stack.callback(close)


class Binder:
    """Passes objects to tools and rewards. `bindings` maps "function.parameter" to object names."""

    def __init__(self, bindings: Mapping[str, str], objects: Objects) -> None:
        self._bindings, self._objects = bindings, objects

    def _objects_of(self, name: str, function: Function) -> dict[str, str]:
        """Return parameter -> object name for those parameters of `function` that get an object."""
        names = {p: self._bindings.get(f"{name}.{p}", p) for p in call_parameters(function)}
        return {p: object_ for p, object_ in names.items() if object_ in self._objects.names}

    def check(self, functions: Iterable[tuple[str, Function]]) -> None:
        """Raise ValueError if a binding is invalid or an object is unused."""
        functions, names = list(functions), self._objects.names
        params = [f"{name}.{p}" for name, function in functions for p in call_parameters(function)]
        for param, name in self._bindings.items():
            if param not in params:
                raise ValueError(
                    f"bindings.{param} is not a parameter of a tool or a reward: choose from "
                    f"{', '.join(params) or 'none'}"
                )
            if name not in names:
                raise ValueError(
                    f"bindings.{param}={name}, but this object does not exist: choose from the "
                    f"objects {', '.join(names) or '(none)'} of shared and per_episode"
                )
        if EPISODE in names:
            raise ValueError(f"the object name {EPISODE} is reserved: rename the object")
        used = {v for pair in functions for v in self._objects_of(*pair).values()}
        if unused := set(names) - used:
            raise ValueError(
                f"no tool and no reward uses {sorted(unused)} of shared or per_episode: add a "
                "parameter of that name to a tool or reward, set a binding, or delete the entry"
            )

    def tool(self, function: Function) -> Function:
        """Return a tool that adds the objects to the arguments that the policy writes."""
        inner = unwrap(function)
        if not inspect.isroutine(inner):
            raise ValueError(f"tools: {type(inner).__name__} is a class: list a function instead")
        objects = self._objects_of(inner.__name__, function)
        others = {name: p for name, p in call_parameters(function).items() if name not in objects}

        @wraps(inner)
        async def tool(episode: Episode, **arguments: Any) -> Any:
            with _wrap_errors(f"the tool {inner.__name__}", inner):
                if EPISODE in others:
                    arguments[EPISODE] = episode
                for parameter, name in objects.items():
                    arguments[parameter] = await self._objects.get(name, episode)
                return await threads.call(function, **arguments)

        # envs/tools.py builds the tool's schema from this signature and these annotations.
        episode = inspect.Parameter(EPISODE, inspect.Parameter.KEYWORD_ONLY)
        from_policy = [p for name, p in others.items() if name != EPISODE]
        tool.__signature__ = inspect.Signature([*from_policy, episode])  # pyright: ignore
        hints = inspect.get_annotations(inner)
        tool.__annotations__ = {name: hints[name] for name in others if name in hints}
        return tool

    def reward(self, name: str, function: Function) -> Reward:
        """Return a reward that takes only `episode`, and passes the objects to `function`."""
        parameters, objects = call_parameters(function), self._objects_of(name, function)
        for parameter, declared in parameters.items():
            if parameter not in (EPISODE, *objects) and declared.default is declared.empty:
                raise ValueError(
                    f"rewards.{name} has the parameter {parameter!r}, which is neither `episode` "
                    f"nor the name of an object ({', '.join(self._objects.names) or 'none'}): add "
                    f"{parameter!r} to shared, or put the parameter after a * and set it in YAML"
                )

        async def reward(episode: Episode) -> Any:
            with _wrap_errors(f"the reward {name}", unwrap(function)):
                values = {p: await self._objects.get(v, episode) for p, v in objects.items()}
                if EPISODE in parameters:
                    values[EPISODE] = episode
                return await threads.call(function, **values)

        return reward


@contextmanager
def _wrap_errors(owner: str, function: Function) -> Iterator[None]:
    """Convert an error, except ToolError, to a RuntimeError that names the function and line."""
    try:
        yield
    except ToolError:
        raise
    except Exception as error:  # User code may raise any exception.
        location = format_location(error, function.__module__)
        raise RuntimeError(f"{owner}: {type(error).__name__}: {error}{location}") from error
