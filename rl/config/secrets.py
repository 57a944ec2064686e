"""Refuse secrets in config.yaml, which is kept and shared with a run."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

_PASSWORD = re.compile(r"^\s*[a-z][a-z0-9+.-]*://[^/?#\s]*@", re.IGNORECASE)
_VARIABLE = re.compile(
    r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+"
)  # the usual form of names of variables that hold keys


def secret_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield one sentence for each value that is a secret; the sentence does not repeat it."""
    for path, value in _texts(config, ""):
        if _PASSWORD.match(value):
            yield (
                f"{path} holds a password (scheme://user:password@host), which would be written to "
                "config.yaml: leave it out, and give a key in an environment variable"
            )
        named = path.endswith("_variable")
        if named and value not in os.environ and not _VARIABLE.fullmatch(value):
            yield (
                f"{path} is not the name of an environment variable that is set, and a key itself "
                "would be written to config.yaml: export MY_KEY=<the key>, and give MY_KEY here"
            )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text of a configuration with its dotted key."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}.{index}")
