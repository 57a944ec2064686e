"""Collect problems that calls with made-up values find in user code, with file and line."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envs.user_code import ROOT, find_location


class BadResult(ValueError):
    """The error raised if user code returned an unusable value; the message has the remedy."""


class Report:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.metric_names: set[str] = set()  # names of the metrics that components returned

    @contextmanager
    def calling(
        self, group: str, made: Any, given: str = "", ignored: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """Record an error in the block as a problem of the component `made`, called with `given`.

        Drop errors of the type `ignored`, because made-up values or missing data may cause them.
        """
        try:
            yield
        except ignored:
            pass
        except BadResult as error:
            self.problems.append(f"{group}: {name_of(made)} {error}{_location(source_of(made))}")
        except Exception as error:  # noqa: BLE001 user code may raise anything
            what = f"{name_of(made)} raised {type(error).__name__}: {error}"
            own = source_of(made)
            file = own and own[0]
            found = find_location(error, file)
            # If code of rl/ raised the error, the first line of the component is reported.
            is_ours = found and found[0] != file and Path(found[0]).is_relative_to(ROOT / "rl")
            place = _location(own if is_ours else found or own)
            self.problems.append(f"{group}: {what}{given and f', called with {given}'}{place}")


def unwrap(made: Any) -> Any:
    """Return the function or class behind partials and decorators, or the class of an instance."""
    while hasattr(made, "func"):
        made = made.func
    made = inspect.unwrap(made) if callable(made) else made
    return made if hasattr(made, "__qualname__") else type(made)


def name_of(made: Any) -> str:
    """Return `package.module.name`, as a `_target_` writes it."""
    made = unwrap(made)
    return f"{made.__module__}.{made.__qualname__}"


def source_of(made: Any) -> tuple[str, int] | None:
    made = unwrap(made)
    try:
        return str(inspect.getsourcefile(made)), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):
        return None


def _location(found: tuple[str, int] | None) -> str:
    return f" ({found[0]}, line {found[1]})" if found else ""


def json_round_trip(state: Any) -> Any:
    """Return a component's state as a checkpoint would restore it, or raise BadResult."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise BadResult(
            f"has a state() that a checkpoint cannot store as JSON ({error}): return only numbers, "
            "texts, lists, and dicts with text keys"
        ) from error
