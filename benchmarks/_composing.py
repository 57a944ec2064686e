"""Configurations composed without a command line, and a stopwatch, for the programs beside it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig

from lab.cli.launch import resolved

CONF = Path(__file__).parents[1] / "conf"


def compose(overrides: list[str]) -> dict[str, Any]:
    """Return conf/train.yaml with these overrides, resolved."""
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        config = hydra.compose("train", overrides, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        return resolved(config)


def seconds(work: Callable[[], object]) -> float:
    """Return how many seconds of wall clock time the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
