"""How long a piece of work takes, for the programs beside this file."""

import time
from collections.abc import Callable


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
