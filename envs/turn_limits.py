"""What ends a turn or an episode, in the whole run (conf/sampler) or in one part of a mixture.

Only what leaves the distribution of the tokens alone can differ between the environments of a run:
the trainer divides all logits by one temperature.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_MOST_STOPS = 4  # as many as the OpenAI API takes
_LIMITS = ("max_tokens", "stop", "rollout_timeout")


def checked_stops(stop: Sequence[str], key: str) -> tuple[str, ...]:
    """Return the texts that end a turn; ValueError, naming the `key`, where they can be none."""
    if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f'{key}={stop} is no list of texts: write ["</answer>"]')
    if "" in stop:
        raise ValueError(f"{key} has an empty text, which would end every turn: leave it out")
    if len(stop) > _MOST_STOPS:
        raise ValueError(
            f"{key} has {len(stop)} texts, and the OpenAI API takes {_MOST_STOPS}: leave some out"
        )
    return tuple(stop)


def checked_limits(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the knobs of the sampler that one environment has for itself; ValueError otherwise."""
    if other := [name for name in given if name not in _LIMITS]:
        raise ValueError(
            f"{key}.{other[0]}: an environment may have its own {', '.join(_LIMITS)}. All else is "
            f"one for the run, for the trainer divides all logits by one temperature: set "
            f"sampler.{other[0]}, or leave it out"
        )
    limits = dict(given)
    if "stop" in limits:
        limits["stop"] = checked_stops(limits["stop"], f"{key}.stop")
    for name, kind, what in (
        ("max_tokens", int, "a whole number, at least 1"),
        ("rollout_timeout", (int, float), "a number above 0"),
    ):
        value = limits.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise ValueError(f"{key}.{name}={value}: {what}")
    return limits
