"""What tools and rewards of a configuration have in common: made once a run, or once an episode.

    shared:       {index: {_target_: my_package.load_index, path: index.json}}
    per_episode:  {notes: {_target_: my_package.Notes}}

A function is called for it, a class constructed. Per episode a function is called each time, with
the `episode` where it takes one, and of a class's object each episode gets a copy; a method `close`
is called when the episode ends.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from functools import cached_property, partial
from inspect import iscoroutinefunction
from typing import Any

from envs import threads
from envs.episode import Episode
from envs.tools import EPISODE, supplied

_MEMORY = "objects"  # where an episode keeps its own


class Objects:
    """Objects by name."""

    def __init__(self, shared: Mapping[str, Any], per_episode: Mapping[str, Any]) -> None:
        if twice := shared.keys() & per_episode.keys():
            raise ValueError(
                f"shared and per_episode both name {', '.join(sorted(twice))}: keep one of them"
            )
        for name, value in per_episode.items():
            kind = value.func if isinstance(value, partial) else type(value)
            if iscoroutinefunction(getattr(kind, "close", None)):
                raise ValueError(
                    f"per_episode.{name}: {kind.__name__}.close is a coroutine, and nobody waits "
                    "for it when an episode ends: make it a plain function"
                )
        self._shared, self._per_episode = dict(shared), dict(per_episode)
        self.names = [*shared, *per_episode]

    def make(self) -> None:
        """Make what is shared, if it is not yet."""
        _ = self._made

    async def get(self, name: str, episode: Episode) -> Any:
        """Return an object, made for this episode where it is to be its own."""
        if name in self._shared:
            return self._made[name]
        own: dict[str, Any] = episode.memory.setdefault(_MEMORY, {})
        if name not in own:
            own[name] = await self._new(self._per_episode[name], episode)
        return own[name]

    def close(self, episode: Episode) -> None:
        """Close what the episode holds, the newest first; raises what one raised, after all."""
        with ExitStack() as stack:
            for value in episode.memory.pop(_MEMORY, {}).values():
                if callable(close := getattr(value, "close", None)):
                    stack.callback(close)

    async def _new(self, value: Any, episode: Episode) -> Any:
        if not isinstance(value, partial):
            return deepcopy(value)
        return await threads.call(value, *([episode] if EPISODE in supplied(value) else []))

    @cached_property
    def _made(self) -> dict[str, Any]:
        return {
            name: value() if isinstance(value, partial) else value  # a function: called once
            for name, value in self._shared.items()
        }
