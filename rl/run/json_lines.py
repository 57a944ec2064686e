"""Records as lines of JSON, whatever an environment or a server has put into them."""

import json
import math
from typing import Any

_DEEPEST = 64  # levels; JSON's own limit is Python's
_LONGEST_INT = 4300  # digits that Python turns into text


def json_line(record: dict[str, Any]) -> str:
    """Return one line of JSON and its end.

    What JSON cannot hold stands there as Python shows it, a number that is not finite as null.
    """
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError):
        return json.dumps(plain(record)) + "\n"


def plain(value: Any, depth: int = 0) -> Any:
    """Return the value as JSON can hold it, whatever it was."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) < 10**_LONGEST_INT:
        return value
    if isinstance(value, dict | list | tuple) and depth < _DEEPEST:
        if isinstance(value, dict):
            return {_shown(key): plain(item, depth + 1) for key, item in value.items()}
        return [plain(item, depth + 1) for item in value]
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 anybody's __repr__
        return f"({type(value).__name__}, which cannot be shown: {type(error).__name__})"
