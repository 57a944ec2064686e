"""Read max_position_embeddings of a model folder; for an adapter, that of its base model."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.runtime.given_files import load_json

ADAPTER = "adapter_config.json"


def base_model_of(path: Any) -> str | None:
    folder = Path(str(path)).expanduser()
    if (folder / "config.json").exists():
        return None
    base = _read_json(folder / ADAPTER).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def positions_of(path: Any) -> int | None:
    config = _read_json(Path(str(base_model_of(path) or path)).expanduser() / "config.json")
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = load_json(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}
