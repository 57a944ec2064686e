"""Compose configurations for tests, and change values in them."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lab.cli.launch import as_plain_dict
from rl.config.check import check, check_learned
from rl.config.endpoints import FILE
from rl.config.learned import Learned
from rl.config.schedules import split_schedules
from rl.config.schema import ConfigError
from rl.dry_call.learn import learn

# The default dtype depends on the machine, but the expected values of tests do not.
OmegaConf.register_new_resolver("fast_dtype", lambda: "bfloat16", replace=True)

REPO = Path(__file__).parents[2]
CONF, SWEEPS = REPO / "conf", REPO / "sweeps"
Changes = Mapping[str, Any]


def composed(
    *overrides: str,
    sweep: str | None = None,
    config_dir: Path | None = None,
    primary: str = "train",
    folder: Path = SWEEPS,
) -> dict[str, Any]:
    """Return the resolved configuration of conf/<primary>.yaml, or of the file `sweep` in `folder`.

    `config_dir` is a folder with further choices, as for --config-dir.
    """
    folder, primary = (folder, sweep) if sweep else (CONF, primary)
    # The shipped files do not change in a process, and composing them takes 0.4 seconds. Files of
    # a test do change: further choices, a model's folder, and endpoints.toml.
    is_fixed = config_dir is None and folder in (CONF, SWEEPS) and not FILE.exists()
    is_fixed &= not any("path=" in word for word in overrides)
    # The current folder is a part of the key, because some values are paths.
    make = _composed_once if is_fixed else _composed_once.__wrapped__
    whole, plain = make(overrides, folder, primary, config_dir, Path.cwd())
    HydraConfig.instance().set_config(whole)
    return deepcopy(plain)


@cache
def _composed_once(
    overrides: tuple[str, ...],
    folder: Path,
    primary: str,
    config_dir: Path | None,
    started_in: Path,
) -> tuple[DictConfig, dict[str, Any]]:
    with initialize_config_dir(str(folder), version_base=None):
        own = f",file://{config_dir}" if config_dir else ""
        search = f"hydra.searchpath=[file://{CONF}{own}]"
        whole = compose(primary, [search, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(whole)
        return whole, as_plain_dict(whole)


def learned(**known: Any) -> dict[str, Any]:
    """Return `learned` as config.yaml holds it: everything False, but for what is known."""
    return {**{field.name: False for field in fields(Learned)}, "loss_reads": [], **known}


def changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a copy of the configuration with these dotted keys set."""
    config = deepcopy(config)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = deepcopy(value)
    return config


def check_all(config: dict[str, Any]) -> None:
    """Check a configuration as train.py does, with the dry call in this process."""
    check(config)
    check_learned(split_schedules(config), learn(config))


def only_problem(config: dict[str, Any]) -> str:
    """Return the only message of the check for a configuration."""
    with pytest.raises(ConfigError) as caught:
        check_all(config)
    (problem,) = caught.value.problems
    return problem


def chosen(group: str, choice: str) -> dict[str, Any]:
    """Return the node of a YAML file, merged with the files in its defaults list."""
    node = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text())
    origins = [entry for entry in node.pop("defaults", ()) if isinstance(entry, str)]
    for origin in (entry for entry in origins if entry != "_self_"):
        node = {**chosen(group, origin), **node}
    return node


def with_choices(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Return `changed`, with the node of conf/<key>/<name>.yaml where a value is "=name"."""
    named = {k: v[1:] for k, v in changes.items() if isinstance(v, str) and v.startswith("=")}
    nodes = {key: chosen(key.rpartition(".")[2], name) for key, name in named.items()}
    return changed(config, {**changes, **nodes})
