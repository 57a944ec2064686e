"""The configuration of a command line, composed in this process."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from rl.launch import resolved

REPO = Path(__file__).parents[2]
CONF, SWEEPS = REPO / "conf", REPO / "sweeps"


def composed(*overrides: str, sweep: str | None = None) -> dict[str, Any]:
    """Resolved, from conf/train.yaml or from a primary config in sweeps/."""
    folder, primary = (SWEEPS, sweep) if sweep else (CONF, "train")
    with initialize_config_dir(str(folder), version_base=None):
        search = f"hydra.searchpath=[file://{CONF}]"
        config = compose(primary, [search, *overrides], return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        return resolved(config)
