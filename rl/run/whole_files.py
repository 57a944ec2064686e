"""Files that others read while they are written."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write aside and rename: whoever reads meanwhile gets the old text or the new, never half."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_private(path: Path, text: str) -> None:
    """Write a new file that we alone can read; FileExistsError if it is there."""
    # Created as such: a mode set later would leave a moment for others.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
