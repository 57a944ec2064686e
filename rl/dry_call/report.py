"""Collect problems that calls with made-up values find in user code, with file and line."""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envs.user_code import ROOT, find_location
from rl.config.build import create_configured
from rl.config.signatures import did_you_mean


class BadResult(ValueError):
    """The error raised if user code returned an unusable value; the message has the remedy."""


class Report:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.metric_names: set[str] = set()  # names of the metrics that components returned

    @contextmanager
    def calling(
        self, group: str, component: Any, args: str = "", ignored: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """Record an error in the block as a problem of `component`, which was called with `args`.

        Drop errors of the type `ignored`, because made-up values or missing data may cause them.
        """
        called = name_of(component) + (f", called with {args}," if args else "")
        try:
            yield
        except ignored:
            pass
        except BadResult as error:
            self._add(group, f"{called} {error}", source_of(component))
        except Exception as error:  # noqa: BLE001 user code may raise anything
            what = f"{called} raised {type(error).__name__}: {error}"
            if isinstance(error, AttributeError) and error.name:
                what += did_you_mean(error.name, dir(error.obj))
            source = source_of(component)
            file = source and source[0]
            found = find_location(error, file)
            # If code of rl/ raised the error, report the first line of the component instead.
            is_ours = found and found[0] != file and Path(found[0]).is_relative_to(ROOT / "rl")
            self._add(group, what, source if is_ours else found or source)

    def _add(self, group: str, problem: str, source: tuple[str, int] | None) -> None:
        where = f" ({source[0]}, line {source[1]})" if source else ""
        self.problems.append(f"{group}: {problem}{where}")


def unwrap(component: Any) -> Any:
    """Return the function or class that `component` calls, or its class if it is an instance."""
    while hasattr(component, "func"):
        component = component.args[0] if component.func is create_configured else component.func
    component = inspect.unwrap(component) if callable(component) else component
    return component if hasattr(component, "__qualname__") else type(component)


def name_of(component: Any) -> str:
    """Return `package.module.name`, the form of a `_target_`."""
    component = unwrap(component)
    return f"{component.__module__}.{component.__qualname__}"


def source_of(component: Any) -> tuple[str, int] | None:
    component = unwrap(component)
    try:
        return str(inspect.getsourcefile(component)), inspect.getsourcelines(component)[1]
    except (OSError, TypeError):
        return None


def json_round_trip(state: Any) -> Any:
    """Return a component's state as a checkpoint would restore it, or raise BadResult."""
    try:
        if (restored := json.loads(json.dumps(state))) == state:
            return restored
        reason = f"{state} becomes {restored}"
    except (TypeError, ValueError) as error:
        reason = str(error)
    raise BadResult(
        f"has a state() that a checkpoint cannot store as JSON ({reason[:200]}): return only "
        "numbers, texts, lists, and dicts with text keys"
    )
