"""The state of a buffer or an example order, as a checkpoint stores it."""

import json
from typing import Any

import numpy as np

from rl.rollouts.prospects import RolloutsFailed


def as_json(owner: object, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as a checkpoint's JSON stores it, numpy values as Python's."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        raise TypeError(f"a {type(value).__name__}")

    try:
        return json.loads(json.dumps(state, default=plain))
    except (TypeError, ValueError) as error:
        raise RolloutsFailed(
            f"{type(owner).__name__}.state() cannot be written to a checkpoint, which is JSON: "
            f"{error}. Return numbers, texts, lists and dicts with texts for keys"
        ) from error
