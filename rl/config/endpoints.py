"""Read endpoints.toml, which defines names for servers and their models (docs/everyday.md)."""

import tomllib
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError

FILE = Path("endpoints.toml")
_FIELDS = {"url", "model", "api_key_variable"}


def with_endpoints(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with URLs instead of names. Raise ConfigError for an unknown name.

    In a mapping with the key `model`, a `url` or `base_url` without "://" is the name of an
    endpoint. The endpoint also sets `api_key_variable`, and sets `model` if the mapping gives none.
    """
    if not FILE.is_file():
        return config
    try:
        endpoints = tomllib.loads(FILE.read_text())
    except ValueError as error:
        raise ConfigError([f"{FILE} cannot be read: {error}"]) from None
    for name, fields in endpoints.items():
        if not isinstance(fields, dict) or not {"url", "model"} <= fields.keys() <= _FIELDS:
            fields = "url and model, and may have api_key_variable, but no other key"
            raise ConfigError([f"{FILE}: [{name}] needs {fields}"])
    return _fill_endpoints(config, endpoints)


def _fill_endpoints(node: Any, endpoints: dict[str, dict[str, str]]) -> Any:
    if not isinstance(node, dict):
        return node
    node = {key: _fill_endpoints(value, endpoints) for key, value in node.items()}
    for key in {"url", "base_url"} & node.keys() if "model" in node else ():
        name = str(node[key] or "???")
        if name != "???" and "://" not in name:
            if name not in endpoints:
                known = " or ".join(endpoints) or "a URL, because the file is empty"
                raise ConfigError([f"{FILE} has no endpoint {name}: use {known}"])
            named = {**endpoints[name], key: endpoints[name]["url"]}
            kept = {} if node["model"] in ("???", None) else {"model": node["model"]}
            node |= {field: named[field] for field in (key, *_FIELDS - {"url"}) if field in named}
            node |= kept
    return node
