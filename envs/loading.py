"""Rows through the library `datasets`, and one sentence where a library could not load."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load_rows(source: str, path: str, **where: Any) -> Any:
    """Return what `datasets.load_dataset` loads.

    Args:
        source: what a message about it says.
        path: a name on the hub, a folder, or a format.
        where: the rest of what that function takes.

    Raises:
        ValueError: it cannot be had; one sentence.

    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} is read through the library `datasets`, which is not installed: "
            "pip install 'offbyone[data]', or write JSON lines and use envs.datasets.JsonLines"
        ) from error
    try:
        return datasets.load_dataset(path, **where)
    except Exception as error:  # its own, the hub's and those of the network
        raise ValueError(
            f"{source} cannot be loaded ({in_one_line(error)}): check its name and splits, or the "
            "network"
        ) from error


def in_one_line(error: Exception) -> str:
    """Return what a library that failed to load something says, short enough for a message."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line, from 1, and its object.

    Raises:
        ValueError: there is no such file, or a line is no object.

    """
    if not path.is_file():
        what = "is a folder: name a file in it" if path.is_dir() else "no such file"
        raise ValueError(f"{path}: {what}")
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
