"""Durations as users write them: 3h30m, 90m, 2h, 45s, 1d12h, or a number of seconds."""

import re

_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PATTERN = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _UNITS))


def seconds_of(duration: float | str) -> float:
    """Return a duration in seconds.

    Raises:
        ValueError: the text is not a duration.

    """
    text = str(duration).replace(" ", "")
    try:
        return float(text)
    except ValueError:
        found = _PATTERN.fullmatch(text)
    if not text or not found:
        raise ValueError(f"{duration} is not a duration")
    pairs = zip(found.groups(), _UNITS.values(), strict=True)
    return sum(float(number) * unit for number, unit in pairs if number)
