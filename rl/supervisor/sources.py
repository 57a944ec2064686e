"""The source files that something made here depends on: whole packages, and what a module uses."""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from rl.config.signatures import Module, source

ROOT = Path(__file__).parents[2]


def package_files(packages: Iterable[str]) -> list[Path]:
    """Every source file of these packages of ours, rl.learner for one."""
    folders = [ROOT.joinpath(*package.split(".")) for package in packages]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def module_files(names: Iterable[str], apart_from: Iterable[str] = ()) -> list[Path]:
    """The files of these modules and of all that they import, but for what is installed.

    `apart_from`: top-level packages that are left out.
    """
    waiting, files, left_out = list(names), dict[str, Path](), set(apart_from)
    while waiting:
        name = waiting.pop()
        if name in files or name.partition(".")[0] in left_out or _installed(name):
            continue
        if (module := source(name)) is not None:
            files[name] = module.path
            waiting += _imports(module)
    return sorted(set(files.values()))


@cache
def _installed(name: str) -> bool:
    """True for a module of Python's or of a package that pip installed, or for none at all."""
    top = name.partition(".")[0]
    spec = None if top in sys.stdlib_module_names else PathFinder.find_spec(top)
    if spec is None:
        return True
    places = [Path(place) for place in (spec.submodule_search_locations or [spec.origin or ""])]
    return any("site-packages" in place.parts for place in places)


def _imports(module: Module) -> Iterator[str]:
    """Every module that may be imported, `from package import module` both ways."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.package.split(".")[: -(node.level - 1) or None] if node.level else []
            package = ".".join([*parents, *([node.module] if node.module else [])])
            yield package
            yield from (f"{package}.{alias.name}" for alias in node.names)
