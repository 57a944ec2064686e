"""Turn outcomes of calls and paths into values that a golden file can hold."""

import asyncio
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.golden import plain


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
