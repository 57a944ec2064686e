"""The shipped configuration, composed once a session."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from composing import composed


@pytest.fixture(scope="session")
def shipped() -> dict[str, Any]:
    return composed()


@pytest.fixture
def config(shipped: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A copy to spoil, whose runs would lie in a folder of their own."""
    return {**deepcopy(shipped), "output_dir": str(tmp_path / "outputs"), "run_name": "here"}
