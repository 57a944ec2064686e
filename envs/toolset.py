"""Tools that belong together, under a name: what they are, what they hold, which gets what.

    toolsets:
      search:
        _target_: envs.toolset.Toolset
        tools: [{_target_: my_package.search, limit: 3}]
        shared: {pages: {_target_: my_package.load_index, path: pages.json}}
        bindings: {search.index: pages}            # its parameter `index` gets `pages`

A file of them is one choice of a user's own group, and `~env.toolsets.search` leaves it out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.tools import Function


@dataclass(frozen=True, kw_only=True)
class Toolset:
    """Parts of a Composed environment; each is as there."""

    tools: Sequence[Function]
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_episode: Mapping[str, Any] = field(default_factory=dict)
    bindings: Mapping[str, str] = field(default_factory=dict)


def joined(parts: Iterable[tuple[str, Mapping[str, Any]]], what: str) -> dict[str, Any]:
    """Return several mappings as one; ValueError where two have the same name.

    Args:
        parts: where each comes from, for the message, and the mapping.
        what: they are, likewise.

    """
    whole: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, part in parts:
        if twice := whole.keys() & part.keys():
            name = min(twice)
            raise ValueError(
                f"{origins[name]} and {origin} both have {what} {name!r}: rename one, and say in "
                "bindings which parameter gets it"
            )
        whole |= part
        origins |= dict.fromkeys(part, origin)
    return whole
