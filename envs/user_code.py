"""Find the line of the user's own code that raised or blocks: outside of Python and of packages."""

import sys
import sysconfig
from functools import cache
from pathlib import Path
from traceback import FrameSummary, extract_tb

ROOT = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))


@cache
def is_library(file: str) -> bool:
    """Whether a file came with Python or was installed, wherever pip was told to install.

    A file of this checkout or of an editable install is not a library.
    """
    path = Path(file)
    if not path.is_absolute():  # such as <frozen importlib>
        return True
    for folder in path.parents:
        if folder.name in ("site-packages", "dist-packages"):
            return True
        if folder == ROOT:
            return False
    # `pip install --target` and a vendor's folder have the packages' metadata beside them.
    top = path.parent
    while (top / "__init__.py").exists():
        top = top.parent
    return path.is_relative_to(_STANDARD) or any(top.glob("*.dist-info"))


def frame_of(error: BaseException, file: str | None = None) -> FrameSummary | None:
    """Return the innermost frame in `file`, else outside of libraries, else of all."""
    frames = extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file]
    own = inside or [frame for frame in frames if not is_library(frame.filename)] or frames
    return own[-1] if own else None


def place_of(error: BaseException, module: str | None = None) -> str:
    """Return ` (file.py:line)`, in the file of `module` if the error passed through it."""
    frame = frame_of(error, getattr(sys.modules.get(module or ""), "__file__", None))
    return f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
