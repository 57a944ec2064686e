"""Read and check options that all environments have.

    system_prompt: Answer in one word.                   a text
    system_prompt: outputs/best/system_prompt.txt        a .txt or .md file that contains the text
    system_prompt: ""                                    no system message

Environments of one run may have different limits (max_tokens, stop, rollout_timeout), but not
different temperatures, because the trainer divides all logits by one temperature.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

# Annotations for the usual ranges of options; rl/config/ranges.py has these and more.
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Probability = Annotated[float, Meta(ge=0, le=1)]

_MAX_STOPS = 4  # maximum number of stop texts that the OpenAI API accepts
_LIMITS = ("max_tokens", "stop", "rollout_timeout")


def check_range(**bounds: int) -> None:
    """Raise ValueError unless 1 <= first value <= second value."""
    (low_name, low), (high_name, high) = bounds.items()
    if not 1 <= low <= high:
        raise ValueError(
            f"{low_name}={low}, {high_name}={high}: set both to at least 1, and {low_name} to at "
            f"most {high_name}"
        )


def read_system_prompt(text_or_path: str) -> str:
    """Return the text, or the content of the .txt or .md file. Strip whitespace at both ends."""
    if "\n" in text_or_path or not text_or_path.endswith((".txt", ".md")):
        return text_or_path.strip()
    try:
        return Path(text_or_path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"system_prompt={text_or_path} is not a readable file ({type(error).__name__}): "
            "correct the path. If the value is the prompt itself, end it with a full stop"
        ) from error


def parse_stops(stop: Sequence[str], key: str) -> tuple[str, ...]:
    """Return `stop`, the texts that end a turn, as a tuple. Raise ValueError if one is invalid."""
    if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"{key}={stop} is not a list of texts: set one, such as ['</answer>']")
    if "" in stop:
        raise ValueError(f"{key} contains an empty text, which would end every turn: remove it")
    if len(stop) > _MAX_STOPS:
        raise ValueError(
            f"{key} has {len(stop)} texts, but the OpenAI API accepts {_MAX_STOPS}: remove some"
        )
    return tuple(stop)


def parse_limits(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Check the sampler options of one environment, and return them with `stop` as a tuple."""
    if other := [name for name in options if name not in _LIMITS]:
        raise ValueError(
            f"{key}.{other[0]}: one environment may have its own {', '.join(_LIMITS)} and no other "
            f"sampler option: set sampler.{other[0]} for the whole run instead"
        )
    limits = dict(options)
    if "stop" in limits:
        limits["stop"] = parse_stops(limits["stop"], f"{key}.stop")
    for name, kind, expected in (
        ("max_tokens", int, "set a whole number, at least 1"),
        ("rollout_timeout", (int, float), "set a number above 0"),
    ):
        value = limits.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise ValueError(f"{key}.{name}={value}: {expected}")
    return limits
