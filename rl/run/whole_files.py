"""Files as a whole: written at once, for us alone, and deleted."""

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


def remove(path: Path) -> None:
    """Delete a folder, a file or a link, never what a link points to."""
    import shutil

    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)  # which follows no links inside either
