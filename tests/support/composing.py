"""Configurations for tests: of a command line, of one file, and with some values changed."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from rl.cli.launch import resolved
from rl.config.check import check
from rl.config.schema import ConfigError

REPO = Path(__file__).parents[2]
CONF, SWEEPS = REPO / "conf", REPO / "sweeps"
Changes = Mapping[str, Any]


def composed(
    *overrides: str,
    sweep: str | None = None,
    config_dir: Path | None = None,
    primary: str = "train",
) -> dict[str, Any]:
    """Resolved, from conf/train.yaml or another primary one, or from one in sweeps/.

    `config_dir` is a folder with choices of one's own, as for --config-dir.
    """
    folder, primary = (SWEEPS, sweep) if sweep else (CONF, primary)
    with initialize_config_dir(str(folder), version_base=None):
        own = f",file://{config_dir}" if config_dir else ""
        search = f"hydra.searchpath=[file://{CONF}{own}]"
        config = compose(primary, [search, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        return resolved(config)


def changed(config: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The configuration with dotted keys set, and nodes replaced by the choice of a YAML file."""
    config = deepcopy(config)
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = deepcopy(value)
    return config


def only_problem(config: dict[str, Any]) -> str:
    """The one sentence with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        check(config)
    (problem,) = caught.value.problems
    return problem


def chosen(group: str, choice: str) -> dict[str, Any]:
    """A node as its YAML file says, and those that it starts from; without Hydra's part."""
    node = yaml.safe_load((CONF / group / f"{choice}.yaml").read_text())
    origins = [entry for entry in node.pop("defaults", ()) if isinstance(entry, str)]
    for origin in (entry for entry in origins if entry != "_self_"):
        node = {**chosen(group, origin), **node}
    return node
