"""Configurations composed without a command line, and a stopwatch, for the programs beside it."""

import time
from collections.abc import Callable
from typing import Any

from tests.support.composing import composed


def compose(overrides: list[str]) -> dict[str, Any]:
    """Return conf/train.yaml with these overrides, resolved."""
    return composed(*overrides)


def seconds(work: Callable[[], object]) -> float:
    """Return how many seconds of wall clock time the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
