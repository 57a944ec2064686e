"""Load rows from files or through the library `datasets`, and keep slow results in a cache.

Each function that can fail raises a ValueError of one sentence with the remedy.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from envs.episode import Example


def cache_folder() -> Path:
    """Return OFFBYONE_CACHE, or ~/.cache/offbyone."""
    return Path(os.environ.get("OFFBYONE_CACHE", "~/.cache/offbyone")).expanduser()


class LazyExamples(Sequence[Example]):
    """Base class of sequences that build an example when it is read: add `__len__` and `made`."""

    def made(self, index: int) -> Example:
        """Return the example at 0 <= index < len(self)."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self.made(i) for i in range(*index.indices(len(self)))]
        return self.made(range(len(self))[index])  # range raises IndexError past the end


def load_rows(source: str, path: str, **options: Any) -> Any:
    """Return what `datasets.load_dataset(path, **options)` loads. Messages name `source`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} is read through the library `datasets`, which is not installed: "
            "pip install 'offbyone[data]', or write JSON lines and use envs.datasets.JsonLines"
        ) from error
    try:
        return datasets.load_dataset(path, **options)
    except Exception as error:  # errors of `datasets`, of the hub and of the network
        raise ValueError(
            f"{source} cannot be loaded ({in_one_line(error)}): check its name and splits, or the "
            "network"
        ) from error


def in_one_line(error: Exception) -> str:
    """Return type and text of another library's error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line, from 1, and its JSON object."""
    if not path.is_file():
        problem = "is a folder: name a file in it" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {problem}")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                place = f"line {number} is no JSON at character {error.colno}"
                raise ValueError(f"{path}, {place}: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield number, row
