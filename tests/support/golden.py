"""Compare what a test computed with a file of tests/golden, which `--write-golden` writes."""

import asyncio
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "golden"
write = False  # tests/conftest.py sets it to the option


def golden(name: str, value: Any) -> None:
    """Fail if `value` is not the stored one: a text as .txt, everything else as .json.

    Floats may differ by a thousandth, because another CPU adds in another order.
    """
    path = FOLDER / f"{name}.{'txt' if isinstance(value, str) else 'json'}"
    text = value if isinstance(value, str) else _pretty(value)
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kept = path.read_text() if path.exists() else "null"
    read = json.loads if path.suffix == ".json" else str.splitlines
    if lines := list(_differences(read(kept), read(text), name)):
        test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].partition("[")[0]
        advice = f"If it is right now: python -m pytest {test} --write-golden, and read git diff"
        pytest.fail("\n".join([*lines[:12], f"{len(lines)} differences. {advice}"]), pytrace=False)


def _differences(stored: Any, now: Any, place: str) -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in stored | now:
            yield from _differences(stored.get(key, ...), now.get(key, ...), f"{place}.{key}")
    elif isinstance(stored, list) and isinstance(now, list):
        for index, pair in enumerate(zip_longest(stored, now, fillvalue=...)):
            yield from _differences(*pair, f"{place}[{index}]")
    elif repr(stored) != repr(now):
        floats = isinstance(stored, float) and isinstance(now, float)
        if not floats or not math.isclose(stored, now, rel_tol=1e-3, abs_tol=1e-6):
            yield f"{place}: {stored!r} is stored, now {now!r}"[:400]


def plain(value: Any) -> Any:
    """Return an array as a list, a record as its fields, and everything else as text."""
    record = vars(value) if hasattr(value, "__dataclass_fields__") else str(value)
    return value.tolist() if hasattr(value, "tolist") else record


def _pretty(value: Any) -> str:
    """Return JSON of six digits, with one line for each list of numbers."""
    text = json.dumps(value, default=plain)
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))
    lines = json.dumps(rounded, indent=1, ensure_ascii=False)
    return re.sub(r'\[\n[^\[\]{}"]*\]', lambda numbers: " ".join(numbers[0].split()), lines) + "\n"


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a call returns (a coroutine is awaited), or the class and text of its error."""
    try:
        value = function(*arguments, **options)
        return asyncio.run(value) if inspect.iscoroutine(value) else value
    except (Exception, SystemExit) as error:  # noqa: BLE001 any error is an outcome
        return f"{type(error).__name__}: {error}"


def without(folder: Path, value: Any) -> Any:
    """Return the value as JSON types, with <folder> in place of the path of a test's folder."""
    return json.loads(json.dumps(value, default=plain).replace(str(folder), "<folder>"))
