"""How long rows a model was built for, as its config.json says."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def positions_of(path: Any) -> int | None:
    """Tokens of the longest row of the model in a folder; None where nobody says."""
    config: Any = None
    with suppress(OSError, ValueError):  # what is wrong with a folder, others say
        config = json.loads(Path(str(path)).expanduser().joinpath("config.json").read_text("utf-8"))
    longest = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return longest if isinstance(longest, int) else None


def too_long(path: Any, max_seq_len: int, group: str) -> str | None:
    """The sentence that refuses a model that was built for shorter rows; `group` names it."""
    longest = positions_of(path)
    if longest is None or max_seq_len <= longest:
        return None
    return (
        f"{group}.max_seq_len={max_seq_len}, but {path} was built for {longest} positions: "
        f"use {group}.max_seq_len={longest} or less"
    )
