"""The shipped configuration, and a folder for modules of a test's own."""

import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from rl.config.signatures import options_of, parse_module
from tests.support.composing import composed


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """The shipped configuration to spoil, whose runs would lie in a folder of their own."""
    return {**composed(), "output_dir": str(tmp_path / "outputs"), "run_name": "here"}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; its modules named knobs_... or rl_own... can be targets."""
    monkeypatch.syspath_prepend(str(tmp_path))
    options_of.cache_clear()
    parse_module.cache_clear()
    invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("knobs_", "rl_own"))]:
        del sys.modules[name]
