"""Lines on the terminal of the process that owns it."""

from contextlib import suppress


def say(text: str) -> None:
    """Print at once; a terminal that was closed ends nothing."""
    with suppress(OSError):
        print(text, flush=True)  # noqa: T201
