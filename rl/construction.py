"""Calls every constructor of a configuration, so that each may object before anything starts."""

from collections.abc import Iterable
from typing import Any

from rl.config import ConfigError, build


def construct(run: Any, groups: Iterable[str]) -> None:
    """Build the nodes of these groups, those that are there, and drop them; they are cheap.

    Raises:
        ConfigError: what every constructor had to say.

    """
    problems: list[str] = []
    for group in groups:
        try:
            if (node := getattr(run, group)) is not None:
                build(node)()
        except Exception as error:  # noqa: BLE001 an environment is user code and may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problems.append(f"{group}: {kind}{error}")
    if problems:
        raise ConfigError(problems)
