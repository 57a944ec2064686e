"""The source files that a cached result depends on: whole packages, and the imports of a module."""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from envs.user_code import is_library
from rl.config.signatures import Module, absolute, source, spec_of

ROOT = Path(__file__).parents[2]


def package_files(packages: Iterable[str]) -> list[Path]:
    """Return every source file of these packages of this checkout, such as rl.learner."""
    folders = [ROOT.joinpath(*package.split(".")) for package in packages]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def module_files(names: Iterable[str], apart_from: Iterable[str] = ()) -> list[Path]:
    """Return the files of these modules and of all that they import, without libraries.

    Args:
        names: of the modules.
        apart_from: top-level packages that are left out.

    """
    waiting, files, left_out = list(names), dict[str, Path](), set(apart_from)
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in files or top in left_out or _is_library(top):
            continue
        if (module := source(name)) is not None:
            files[name] = module.path
            waiting += _imports(module)
    return sorted(set(files.values()))


@cache
def _is_library(top: str) -> bool:
    """Whether a top-level module came with Python, was installed, or does not exist."""
    spec = None if top in sys.stdlib_module_names else spec_of(top)
    if spec is None:
        return True
    folders = [str(Path(folder, "__init__.py")) for folder in spec.submodule_search_locations or ()]
    return all(is_library(file) for file in folders or [spec.origin or ""])


def _imports(module: Module) -> Iterator[str]:
    """Yield each module that a file may import, `from package import module` both ways."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = absolute(module, node)
            yield package
            yield from (f"{package}.{alias.name}" for alias in node.names)
