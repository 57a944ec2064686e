"""endpoints.toml in the current folder: names for servers, their models and keys.

[judge]                                  env.judge.url=judge, client.url=judge, reference.url=judge
url = "https://host/v1"                  or reflection.base_url=judge
model = "name-on-the-server"
api_key_variable = "JUDGE_KEY"           # environment variable that contains the key; optional
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.config.signatures import did_you_mean

FILE = Path("endpoints.toml")
_FIELDS = {"url", "model", "api_key_variable"}


def with_endpoints(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with url, model and key of each endpoint that a `url` names.

    Raises:
        ConfigError: the file is unreadable, or has no endpoint of this name.
    """
    return _filled(config, _endpoints()) if FILE.is_file() else config


def _endpoints() -> dict[str, dict[str, str]]:
    try:
        found = tomllib.loads(FILE.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{FILE} cannot be read: {error}"]) from None
    for name, fields in found.items():
        if not isinstance(fields, dict) or not {"url", "model"} <= set(fields) <= _FIELDS:
            raise ConfigError(
                [f"{FILE}: [{name}] needs url and model, and may have api_key_variable"]
            )
    return found


def _filled(node: Any, endpoints: Mapping[str, dict[str, str]]) -> Any:
    if not isinstance(node, dict):
        return node
    node = {key: _filled(value, endpoints) for key, value in node.items()}
    for key in {"url", "base_url"} & node.keys() if "model" in node else ():
        name = node[key]
        if isinstance(name, str) and name != "???" and "://" not in name:
            if name not in endpoints:
                hint = did_you_mean(name, list(endpoints)) or f": it has {', '.join(endpoints)}"
                raise ConfigError([f"{FILE} has no endpoint {name}{hint}"])
            chosen = dict(endpoints[name])
            node[key] = chosen.pop("url")
            if node["model"] not in ("???", None):  # the user has chosen another of its models
                chosen.pop("model")
            node |= chosen
    return node
