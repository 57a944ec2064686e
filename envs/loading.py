"""Loads rows from JSON lines or through the library `datasets`. Every error is a ValueError."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envs.episode import Example


def cache_folder() -> Path:
    """Return the cache folder: $OFFBYONE_CACHE, or ~/.cache/offbyone if unset."""
    return Path(os.environ.get("OFFBYONE_CACHE", "~/.cache/offbyone")).expanduser()


class LazyExamples(Sequence[Example]):
    """Base class of lazy sequences of examples. Subclasses define `__len__` and `example_at`."""

    def example_at(self, index: int) -> Example:
        """Build and return the example at `index`, where 0 <= index < len(self)."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.example_at(i) for i in range(*index.indices(len(self)))]
        return self.example_at(range(len(self))[index])  # range() raises IndexError out of bounds


def load_rows(source: str, path: str, **options: Any) -> Any:
    """Return `datasets.load_dataset(path, **options)`. Error messages name `source`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} needs the library `datasets`, which is not installed: run "
            "`pip install datasets`, or write JSON lines and use envs.datasets.JsonLines"
        ) from error
    try:
        return datasets.load_dataset(path, **options)
    except Exception as error:  # `datasets`, the hub and the network raise many error types.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{source} cannot be loaded ({reason}): check its name and splits, and the network"
        ) from error


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number (from 1) and the JSON object of each non-empty line of a file."""
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
                place = f"line {number} is not JSON at character {error.colno}"
                raise ValueError(f"{path}, {place}: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object: correct this line")
            yield number, row
