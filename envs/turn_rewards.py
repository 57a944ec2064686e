"""What `score` may return for a reward: one number, or one for each of the policy's turns.

{"exact": 1.0}                  one number for the episode
{"exact": [1.0, 0.0, 1.0]}      one for each of its turns; the reward is their sum
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def by_name(
    scored: Mapping[str, Any], turns: int
) -> tuple[dict[str, float], dict[str, tuple[float, ...]]]:
    """Return each reward as a whole, and of those that were given by turn each turn's part.

    Raises:
        ValueError: a reward does not have one number for each of the `turns`.

    """
    rewards: dict[str, float] = {}
    parts: dict[str, tuple[float, ...]] = {}
    for name, value in scored.items():
        if not isinstance(value, Iterable) or isinstance(value, str):
            rewards[name] = float(value)
            continue
        part = tuple(float(one) for one in value)
        if len(part) != turns:
            raise ValueError(
                f"score returned {len(part)} numbers for {name!r} after {turns} turns of the "
                "policy: return one for each turn, or one number for the whole episode"
            )
        parts[name], rewards[name] = part, _sum(part)
    return rewards, parts


def _sum(part: tuple[float, ...]) -> float:
    # Thirds make a whole; and fsum raises where infinities meet.
    return math.fsum(part) if all(map(math.isfinite, part)) else math.nan
