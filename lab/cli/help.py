"""Format a configuration for --help: key=value, then the comment above the key in its YAML."""

import json
import re
from pathlib import Path
from textwrap import TextWrapper

import yaml
from omegaconf import DictConfig, OmegaConf

from rl.runtime.text import leaves

_KEY = re.compile(r"( *)(\w+):")
_INDENTED = TextWrapper(96, initial_indent="    ", subsequent_indent="    ")


def explained_keys(*, _root_: DictConfig) -> str:
    runtime, name = _root_.hydra.runtime, _root_.hydra.job.config_name
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    comments = _comments(folders, name)
    for group, choice in runtime.choices.items():
        own = _comments(folders, f"{group}/{choice}") if "/" not in group else {}
        comments |= {f"{group}.{key}": comment for key, comment in own.items()}
    config = OmegaConf.to_container(_root_)
    assert isinstance(config, dict)
    del config["hydra"]
    lines = []
    for key, value in leaves(config, of_lists=False):
        if not key.endswith("._target_"):
            text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
            lines += [f"{key}={text}", *_INDENTED.wrap(comments.get(key, ""))]
    return "\n".join(lines).replace("$", "$$")  # Hydra's help template prints $$ as $


def _comments(folders: list[Path], name: str) -> dict[str, str]:
    """Return {dotted key: comment above the key} of a file and of the files that it inherits."""
    path = next((p for p in (f / f"{name}.yaml" for f in folders) if p.is_file()), None)
    if path is None:
        return {}
    text, group = path.read_text(), name.rpartition("/")[0]
    comments, above, parents = {}, [], []
    for line in text.splitlines():
        if found := _KEY.match(line):
            parents = [*parents[: len(found[1]) // 2], found[2]]
            comments |= {".".join(parents): " ".join(above)} if above else {}
        above = [*above, line.lstrip("# ")] if line.lstrip().startswith("#") else []
    bases = (yaml.safe_load(text) or {}).get("defaults", [])
    inherited = [_comments(folders, f"{group}/{b}") for b in bases if isinstance(b, str) and group]
    return {key: text for own in [*inherited, comments] for key, text in own.items()}
