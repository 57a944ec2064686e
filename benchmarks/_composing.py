"""Configurations as the command line would make them, without a command line."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

from rl.cli.launch import resolved

CONF = Path(__file__).parents[1] / "conf"


def compose(overrides: list[str]) -> dict[str, Any]:
    """Return conf/train.yaml with these overrides, resolved."""
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        config = hydra.compose("train", overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        return resolved(config)
