"""What the programs share: stopwatches, a run folder with a model, the line that they print."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rl.config.build import build
from rl.runtime.folder import RunFolder

T = TypeVar("T")
Work = Callable[[], object]
Clock = Callable[[], float]


def seconds(work: Work, clock: Clock = time.perf_counter) -> float:
    """Return how many seconds the work takes."""
    began = clock()
    work()
    return clock() - began


def rounds(
    works: Mapping[T, Work], repeats: int, clock: Clock = time.perf_counter
) -> dict[T, list[float]]:
    """Return the seconds of each work in alternating rounds, after a round that warms up."""
    took: dict[T, list[float]] = {name: [] for name in works}
    for _ in range(repeats + 1):
        for name, work in works.items():
            took[name].append(seconds(work, clock))
    return {name: times[1:] for name, times in took.items()}


def ratio(times: list[float], baseline: list[float]) -> float:
    """Return the median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


@contextmanager
def folder_with(model: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Yield a temporary run folder with the model of this node."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.set_model(build(model)().prepare(folder.built_model))
        yield folder


def say(**line: Any) -> None:
    """Print a measurement as a JSON line; floats have four significant digits."""
    short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()}
    print(json.dumps(short), flush=True)
