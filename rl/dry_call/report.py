"""How a dry call reports what a user's code raised or returned: value, remedy, file and line."""

import inspect
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

ROOT = Path(__file__).parents[2]
STANDARD = Path(sysconfig.get_path("stdlib"))


class Wrong(ValueError):
    """The code under test returned something that a run cannot use; the message has the remedy."""


class Report:
    """Collects the problems of one configuration."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def calling(
        self,
        group: str,
        made: Any,
        given: str = "",
        unknown: type[Exception] | tuple[()] = (),
    ) -> Iterator[None]:
        """Note what the block raises as a problem of `made`, which was called with `given`.

        An error of the type `unknown` is ignored, because made-up values may cause it.
        """
        try:
            yield
        except unknown:
            pass
        except Wrong as wrong:
            self.problems.append(f"{group}: {name_of(made)} {wrong}{_place(defined_at(made))}")
        except Exception as error:  # noqa: BLE001 user code may raise anything
            what = f"{name_of(made)} raised {type(error).__name__}: {error}"
            place = _place(raised_at(error, made))
            self.problems.append(f"{group}: {what}{given and f', called with {given}'}{place}")


def unwrapped(made: Any) -> Any:
    """Return the user's function or class behind partials, decorators and instances."""
    while hasattr(made, "func"):
        made = made.func
    made = inspect.unwrap(made) if callable(made) else made
    return made if hasattr(made, "__qualname__") else type(made)


def name_of(made: Any) -> str:
    """Return `package.module.name`, as a `_target_` writes it."""
    made = unwrapped(made)
    return f"{made.__module__}.{made.__qualname__}"


def defined_at(made: Any) -> tuple[str, int] | None:
    """Return the file and the line where a function or class begins."""
    made = unwrapped(made)
    try:
        return str(inspect.getsourcefile(made)), inspect.getsourcelines(made)[1]
    except (OSError, TypeError):
        return None


def raised_at(error: BaseException, made: Any) -> tuple[str, int] | None:
    """Return the last line of the user's own code that an exception passed through."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = [f for f in extract_tb(error.__traceback__) if not is_library(f.filename)]
    inner = [f for f in frames if not Path(f.filename).is_relative_to(ROOT / "rl" / "dry_call")]
    if not inner:
        return defined_at(made)
    own = defined_at(made)
    same = [f for f in inner if own and f.filename == own[0]]
    last = (same or inner)[-1]
    return last.filename, last.lineno or 1


def is_library(file: str) -> bool:
    """Whether a file came with Python or was installed, wherever pip was told to install.

    What lies in this checkout or in an editable install is not a library.
    """
    path = Path(file)
    if not path.is_absolute():
        return True
    for folder in path.parents:
        if folder.name in ("site-packages", "dist-packages"):
            return True
        if folder == ROOT:
            return False
    # `pip install --target` and a vendor's folder have the packages' metadata beside them.
    top = path.parent
    while (top / "__init__.py").exists():
        top = top.parent
    return path.is_relative_to(STANDARD) or any(top.glob("*.dist-info"))


def _place(place: tuple[str, int] | None) -> str:
    return f" ({place[0]}, line {place[1]})" if place else ""
