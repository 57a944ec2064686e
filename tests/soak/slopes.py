"""Slopes of memory per step, with intervals.

Each lifetime of a process is one block, because memory is correlated from step to step, but the
lifetimes of a process are independent. The slope of a process is the least-squares slope over all
its lifetimes, each with its own intercept. Its 95 % interval is that of 10,000 bootstrap samples of
whole lifetimes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

WARM_UP = 1000  # steps of each lifetime that are left out: caches and allocators fill
FEWEST = 5  # samples of a lifetime that counts
RESAMPLES = 10_000

Sample = Mapping[str, Any]
HEADS = ("process", "lifetimes", "samples", "memory", "slope", "interval")
HEADS += ("descriptors", "threads", "shared memory")


def table(samples: Iterable[Sample]) -> str:
    """Return the table of all processes as Markdown."""
    lines = [HEADS, ("---",) * len(HEADS)]
    by_process: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_process[sample["process"]].append(sample)
    for name, own in sorted(by_process.items()):
        lives = lifetimes(own)
        if not lives:
            continue
        kept = [sample for life in lives for sample in life]
        memory = [sample["kib"] / 1024 for sample in kept]
        slope, low, high = slope_of(lives)
        ends = [(life[0], life[-1]) for life in lives]

        def change(key: str, unit: int = 1, ends: Any = ends) -> str:
            first, last = (max(pair[i][key] for pair in ends) // unit for i in (0, 1))
            return f"{first} to {last}"

        between = f"{low:+.2f} to {high:+.2f}" if len(lives) > 1 else "one lifetime"
        lines.append(
            (
                *(
                    name,
                    str(len(lives)),
                    str(len(kept)),
                    f"{min(memory):.0f} to {max(memory):.0f} MiB",
                ),
                *(f"{slope:+.2f} KiB per step", between),
                *(change("descriptors"), change("threads"), f"{change('shared_kib', 1024)} MiB"),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lifetimes(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Return the samples of each lifetime of a process, without its first steps."""
    by_life: dict[Any, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_life[sample["piece"], sample["pid"]].append(sample)
    lives = [
        [each for each in life if each["step"] >= life[0]["step"] + WARM_UP]
        for life in by_life.values()
    ]
    return [life for life in lives if len(life) >= FEWEST]


def slope_of(lives: list[list[Sample]]) -> tuple[float, float, float]:
    """Return the slope in KiB per step, and its interval."""
    sums = []
    for life in lives:
        steps, memory = (np.array([each[k] for each in life], float) for k in ("step", "kib"))
        from_mean = steps - steps.mean()
        sums.append((from_mean @ memory, from_mean @ from_mean))
    pairs = np.array(sums)  # [lifetimes, 2]
    chosen = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    resampled = pairs[chosen].sum(1)  # [RESAMPLES, 2]
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    whole = pairs.sum(0)
    return float(whole[0] / whole[1]), float(low), float(high)
