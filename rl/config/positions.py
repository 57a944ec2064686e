"""Find a model's number of positions. Find an adapter's base model, and say how to merge both."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.runtime.given_files import load_json

ADAPTER = "adapter_config.json"
# Copy the tokenizer and the generation config, then save the base model with the adapter added.
_MERGE = (
    "import peft, shutil, sys; hf, merged = sys.argv[1:]; "
    'shutil.copytree(hf, merged, ignore=shutil.ignore_patterns("adapter*")); '
    "peft.AutoPeftModelForCausalLM.from_pretrained(hf).merge_and_unload().save_pretrained(merged)"
)


def base_model_of(path: Any) -> str | None:
    folder = Path(str(path)).expanduser()
    if (folder / "config.json").exists():
        return None
    base = _read_json(folder / ADAPTER).get("base_model_name_or_path")
    return base if isinstance(base, str) else None


def merge_advice(folder: Path, key: str) -> str:
    """Return an error message with the command that merges the adapter into its base model."""
    command = shlex.join(["python", "-c", _MERGE, str(folder), "merged"])
    return f"{folder} contains only an adapter: run `{command}`, then use {key}=merged"


def positions_of(path: Any) -> int | None:
    config = _read_json(Path(str(base_model_of(path) or path)).expanduser() / "config.json")
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = load_json(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}
