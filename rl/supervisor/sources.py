"""The source files that something made here depends on: whole packages, and what a module uses."""

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError, parsed
from rl.config.signatures import Module, source

ROOT = Path(__file__).parents[2]


def package_files(packages: Iterable[str]) -> list[Path]:
    """Every source file of these packages of ours, rl.learner for one."""
    folders = [ROOT.joinpath(*package.split(".")) for package in packages]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def module_files(
    names: Iterable[str], apart_from: Iterable[str] = (), *, certain: bool = False
) -> list[Path]:
    """The files of these modules and of all that they import, but for what is installed.

    Args:
        names: of the modules.
        apart_from: top-level packages that are left out.
        certain: follow what is imported wherever the module is, without an `if`, `try` or `def`.

    """
    waiting, files, left_out = list(names), dict[str, Path](), set(apart_from)
    while waiting:
        name = waiting.pop()
        if name in files or name.partition(".")[0] in left_out or _installed(name):
            continue
        if (module := source(name)) is not None:
            files[name] = module.path
            waiting += _imports(module.tree.body if certain else ast.walk(module.tree), module)
    return sorted(set(files.values()))


def check_imports(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for each node whose module cannot be imported, as far as can be seen.

    Some are imported by the trainer alone, half a minute later and without a word of which it was.
    """
    problems: list[str] = []
    for group, node in config.items():
        target = node.get("_target_") if isinstance(node, Mapping) else None
        if not isinstance(target, str):
            continue
        with parsed():
            paths = module_files([target.rpartition(".")[0]], certain=True)
        for path in paths:
            missing = {name for name in _needed(path) if _top_is_missing(name)}
            problems += [
                f"{group}: {target} cannot be imported, for {path} imports {name}, which is not "
                "installed"
                for name in sorted(missing)
            ]
    if problems:
        raise ConfigError(problems)


def _needed(path: Path) -> Iterator[str]:
    """What a file imports without an `if` or a `try`."""
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


@cache
def _top_is_missing(name: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.modules:
        return False
    return importlib.util.find_spec(top) is None


@cache
def _installed(name: str) -> bool:
    """True for a module of Python's or of a package that pip installed, or for none at all."""
    top = name.partition(".")[0]
    spec = None if top in sys.stdlib_module_names else PathFinder.find_spec(top)
    if spec is None:
        return True
    places = [Path(place) for place in (spec.submodule_search_locations or [spec.origin or ""])]
    return any("site-packages" in place.parts for place in places)


def _imports(nodes: Iterable[ast.AST], module: Module) -> Iterator[str]:
    """Every module that these nodes may import, `from package import module` both ways."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.package.split(".")[: -(node.level - 1) or None] if node.level else []
            package = ".".join([*parents, *([node.module] if node.module else [])])
            yield package
            yield from (f"{package}.{alias.name}" for alias in node.names)
