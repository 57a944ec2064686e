"""An object that runs code when it is unpickled."""

from pathlib import Path
from typing import Any


class Written:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)
