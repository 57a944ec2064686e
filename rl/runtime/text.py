"""Text for the terminal and from the command line."""

import os
import re
from contextlib import suppress
from pathlib import Path

_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?)")  # colours, titles
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def strip_escapes(text: str) -> str:
    """Remove control characters, which a server or a policy may have written."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def say(text: str) -> None:
    """Print and flush; ignore a terminal that was closed."""
    with suppress(OSError):
        print(text, flush=True)  # noqa: T201


def key_of(override: str) -> str:
    """Return the key that an override sets."""
    return override.partition("=")[0].lstrip("+~")


def relative_path(path: Path) -> str:
    """Return the path relative to the working directory if the path is inside it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
