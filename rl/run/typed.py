"""What stands on a command line, as somebody who works here types it."""

import os
from pathlib import Path


def key_of(override: str) -> str:
    """The key an override sets."""
    return override.partition("=")[0].lstrip("+~")


def as_typed(path: Path) -> str:
    """A path, from the working directory where it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
