"""JSON lines: a file with one JSON object a line; empty lines count for nothing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each line, from 1, and its object.

    Raises:
        ValueError: there is no such file, or a line is no object.

    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield number, row
