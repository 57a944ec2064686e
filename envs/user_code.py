"""Distinguish user code from libraries, and find the line of user code that raised an error."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from traceback import extract_tb

ROOT = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_CHECKS_RESULTS = str(ROOT / "losses" / "tokens.py")  # its errors are about a result of user code


@cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package.

    Files of this checkout and of editable installs count as the user's code.
    """
    path = Path(file)
    if not path.is_absolute():  # a name such as <frozen importlib>
        return True
    for folder in path.parents:
        if folder.name in ("site-packages", "dist-packages"):
            return True
        if folder == ROOT:
            return False
    # A .dist-info folder beside the package means that `pip install --target` installed it.
    top = path.parent
    while (top / "__init__.py").exists():
        top = top.parent
    return path.is_relative_to(_STANDARD) or any(top.glob("*.dist-info"))


def find_location(error: BaseException, file: str | None = None) -> tuple[str, int] | None:
    """Return the file and line that raised an error; None if the error has no traceback.

    Of the traceback's frames, the innermost one in `file` counts, else the innermost one in the
    user's code, else the innermost one of all. For a syntax error, return its line in the source.
    """
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return str(error.filename), error.lineno or 1
    frames = [f for f in extract_tb(error.__traceback__) if f.filename != _CHECKS_RESULTS]
    inside = [frame for frame in frames if frame.filename == file]
    chosen = inside or [frame for frame in frames if not is_library(frame.filename)] or frames
    return (chosen[-1].filename, chosen[-1].lineno or 1) if chosen else None


def format_location(error: BaseException, module: str | None = None) -> str:
    """Return the line that raised the error, if possible one in `module`, as ` (file.py:12)`."""
    found = find_location(error, getattr(sys.modules.get(module or ""), "__file__", None))
    return f" ({Path(found[0]).name}:{found[1]})" if found else ""
