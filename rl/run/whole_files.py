"""Files that others read while they are written."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write aside and rename: whoever reads meanwhile gets the old text or the new, never half."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
