"""How long rows a model was built for, as its config.json says; of a LoRA adapter, its base's."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

ADAPTER = "adapter_config.json"


def base_of(path: Any) -> str | None:
    """The model that the adapter in a folder belongs to; None where there is no adapter."""
    folder = Path(str(path)).expanduser()
    if (folder / "config.json").exists():
        return None
    base = _read(folder / ADAPTER).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def positions_of(path: Any) -> int | None:
    """Tokens of the longest row of the model in a folder; None where nobody says."""
    config = _read(Path(str(base_of(path) or path)).expanduser() / "config.json")
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


def _read(path: Path) -> dict[str, Any]:
    """What a file of JSON holds; nothing where it cannot be read, which others say."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text("utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def too_long(path: Any, max_seq_len: int, group: str) -> str | None:
    """The sentence that refuses a model that was built for shorter rows; `group` names it."""
    longest = positions_of(path)
    if longest is None or max_seq_len <= longest:
        return None
    return (
        f"{group}.max_seq_len={max_seq_len}, but {path} was built for {longest} positions: "
        f"use {group}.max_seq_len={longest} or less"
    )
