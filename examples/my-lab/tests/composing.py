"""Compose configurations as `offbyone train` does in this folder."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from lab.cli.launch import as_plain_dict
from rl.config.shipped import CONF as SHIPPED

OURS = Path(__file__).parents[1] / "conf"


def composed(*overrides: str, primary: str = "train") -> dict[str, Any]:
    """Return the resolved configuration of a run, or of the sweep file `primary` in conf/."""
    home, other = (SHIPPED, OURS) if primary == "train" else (OURS, SHIPPED)
    with initialize_config_dir(str(home), version_base=None):
        search = f"hydra.searchpath=[file://{other}]"
        config = compose(primary, [search, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)  # ${hydra:...} reads this configuration
        return as_plain_dict(config)
