"""Text functions for the terminal, and for the dotted keys of overrides and configurations."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # ANSI escapes
# This pattern matches the out-of-memory errors of Python, C++, CUDA and the operating system.
OUT_OF_MEMORY = (
    "(?i)out of memory|memory ran out|(can't|cannot|unable to) allocate|MemoryError|bad_alloc"
)
# These options concern one start of a run, so their values may differ at a resume.
START_KEYS = {"run_name", "resume", "accept_changed_code"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters except tab and newline


def printable(text: str) -> str:
    """Remove ANSI escapes, and control characters except tab and newline. Surrogates become "?"."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text)).encode(errors="replace").decode()


def say(text: str) -> None:
    """Print the printable part of a text and flush. Ignore the error of a closed terminal."""
    with suppress(OSError):
        print(printable(text), flush=True)  # noqa: T201


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def leaves(value: Any, path: str = "", *, of_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each leaf. Unless `of_lists`, a whole list is one leaf."""
    items = dict(enumerate(value)) if of_lists and isinstance(value, list) else value
    if isinstance(items, Mapping) and items:
        for key, item in items.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key), of_lists=of_lists)
    else:
        yield path, value


def relative_path(path: Path) -> str:
    """Return a path inside the working folder as a relative path, and any other path unchanged."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
