"""Read the options of a `_target_` from its source, because importing a loss takes seconds.

    @dataclass(frozen=True, kw_only=True)     def cispo(tokens: Tokens, *, clip_low: float): ...
    class Reverse(Environment):                         |                '- options: from YAML
        min_length: int                                 '- positional: supplied by code

Options are the keyword-only parameters of a function, or of a class's methods `__init__` and
`configure` (inherited ones included), and the keyword-only fields of a dataclass. This module runs
no user code. rl/dry_call/learn.py later calls components to find what they read and return.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MIN_SIMILARITY = 1.2  # minimum similarity of a suggestion; equal words have similarity 2
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


# `parse_module` makes only one Module per name, so modules are compared by identity.
@dataclass(frozen=True, eq=False)
class Module:
    name: str
    path: Path
    tree: ast.Module

    def statements(self) -> Iterator[ast.stmt]:
        """Yield top-level statements, including those inside `if` and `try`."""
        stack = self.tree.body[::-1]
        while stack:
            statement = stack.pop()
            yield statement
            if isinstance(statement, ast.If | ast.Try):
                stack += reversed([*statement.body, *statement.orelse])


Found = tuple[Module, ast.stmt]


@dataclass(frozen=True, eq=False)
class Option:
    annotation: ast.expr | None
    required: bool  # whether the parameter has no default
    module: Module  # module in which the annotation's names are looked up
    configured: bool = False  # whether this is a parameter of the method `configure`


Options = dict[str, Option]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `: did you mean x?` with the closest known word, or "" if no word is close."""

    def similarity(other: str) -> tuple[float, float]:
        order = difflib.SequenceMatcher(None, word, other).ratio()
        letters = difflib.SequenceMatcher(None, sorted(word), sorted(other)).ratio()
        # `letters` is 1 if both words have the same letters, such as gpro and grpo.
        return order + letters, letters

    closest = max(known, key=similarity, default="")
    return f": did you mean {closest}?" if similarity(closest)[0] >= _MIN_SIMILARITY else ""


@cache
def parse_module(name: str) -> Module | None:
    spec = spec_of(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    return Module(name, path, ast.parse(path.read_bytes(), filename=str(path)))


def spec_of(name: str) -> ModuleSpec | None:
    """Return a module's spec like importlib.util.find_spec, without importing parent packages."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # some modules have no spec, for example __main__
        return None
    for name_below in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(f"{spec.name}.{name_below}", path)
    return spec


def find_definition(
    module: Module, name: str, seen: frozenset[str] = frozenset(), subclass: ast.stmt | None = None
) -> Found | None:
    """Return (module, statement) that define what `module` calls `name`, or None. Follow imports.

    `subclass`: the class whose base is looked up. Skip it, because it may have its base's name.
    """
    if f"{module.name}:{name}" in seen:  # star imports may be circular
        return None
    seen |= {f"{module.name}:{name}"}
    head, _, attributes = name.partition(".")
    for statement in () if attributes else module.statements():
        match statement:
            case (
                ast.FunctionDef(name=defined)
                | ast.AsyncFunctionDef(name=defined)
                | ast.ClassDef(name=defined)
                | ast.Assign(targets=[ast.Name(id=defined)])
                | ast.AnnAssign(target=ast.Name(id=defined))
            ) if defined == name and statement is not subclass:
                return module, statement
    for origin in _import_origins(module, head):
        parts = [*origin.split("."), *(attributes.split(".") if attributes else [])]
        for length in range(len(parts) - 1, 0, -1):
            imported = parse_module(".".join(parts[:length]))
            if imported and (found := find_definition(imported, ".".join(parts[length:]), seen)):
                return found
    return None


def _import_origins(module: Module, name: str) -> Iterator[str]:
    for statement in module.statements():
        match statement:
            case ast.ImportFrom():
                origin = absolute_module(module, statement)
                for alias in statement.names:
                    if name == (alias.asname or alias.name):
                        yield f"{origin}.{alias.name}"
                    elif alias.name == "*" and parse_module(origin):
                        yield f"{origin}.{name}"
            case ast.Import():
                for alias in statement.names:
                    if alias.asname == name:
                        yield alias.name
                    elif not alias.asname and alias.name.partition(".")[0] == name:
                        yield name


def absolute_module(module: Module, statement: ast.ImportFrom) -> str:
    parts = module.name.split(".")
    # The first dot means the module's package, or the module itself if it is a package.
    up = statement.level - (module.path.stem == "__init__")
    base = parts[: len(parts) - up] if statement.level else []
    return ".".join([*base, *([statement.module] if statement.module else [])])


@cache
def options_of(target: str) -> Options:
    """Return the options of `package.module.name`; raise LookupError if `name` does not exist."""
    module, definition = definition_of(target)
    if not isinstance(definition, ast.ClassDef):
        return _function_options(module, definition)
    made = _method_options(module, definition, "__init__") or {}
    later = _method_options(module, definition, "configure") or {}
    # If both methods have an option of the same name, only the constructor receives it.
    return {key: replace(option, configured=True) for key, option in later.items()} | made


def definition_of(target: str) -> tuple[Module, Definition]:
    """Return the function or class `package.module.name`; raise LookupError if it is missing."""
    name, _, attribute = target.rpartition(".")
    if not name:
        raise LookupError(f"{target!r} has no module: write package.module.name")
    module = parse_module(name)
    if module is None:
        path = f"{name.replace('.', '/')}.py"
        if Path(path).is_file() and spec_of(top := name.partition(".")[0]):
            raise LookupError(
                f"Python imports another package {top} instead of the folder {top} in "
                f"{Path.cwd()}: rename the folder, for example to my_{top}"
            )
        start = f": run from the folder that holds {path}, or put that folder into PYTHONPATH"
        hint = did_you_mean(name, _sibling_modules(name)) or start
        raise LookupError(f"there is no module {name}{hint}")
    found = find_definition(module, attribute)
    if not found or not isinstance(found[1], Definition):
        known = (s.name for s in module.statements() if isinstance(s, Definition))
        hint = did_you_mean(attribute, known)
        raise LookupError(f"{name} has no function or class {attribute!r}{hint}")
    return found[0], found[1]


def _sibling_modules(name: str) -> list[str]:
    package = name.rpartition(".")[0]
    spec = spec_of(package) if package else None
    folders = spec.submodule_search_locations or [] if spec else []
    return [f"{package}.{p.stem}" for folder in folders for p in Path(folder).glob("*.py")]


def _function_options(module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Options:
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {arg.arg: Option(arg.annotation, default is None, module) for arg, default in pairs}


def _method_options(module: Module, definition: ast.ClassDef, name: str) -> Options | None:
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return _function_options(module, statement)
    if name == "__init__" and _dataclass_decorator(definition):
        return _field_options(module, definition)
    inherited = (_method_options(*base, name) for base in bases(module, definition))
    return next((options for options in inherited if options is not None), None)


def bases(module: Module, definition: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
    for base in definition.bases:
        while isinstance(base, ast.Subscript):  # Base[T] becomes Base
            base = base.value
        found = find_definition(module, ast.unparse(base), subclass=definition)
        if found and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def _dataclass_decorator(definition: ast.ClassDef) -> str:
    decorators = map(ast.unparse, definition.decorator_list)
    return next((text for text in decorators if text.split("(")[0].endswith("dataclass")), "")


def _field_options(module: Module, definition: ast.ClassDef) -> Options:
    """Return the options of the `__init__` that @dataclass generates."""
    options: Options = {}
    for base in reversed(list(bases(module, definition))):
        if _dataclass_decorator(base[1]):
            options |= _field_options(*base)
    keyword_only = "kw_only=True" in _dataclass_decorator(definition)
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, kind = statement.target.id, ast.unparse(statement.annotation)
        default = ast.unparse(statement.value) if statement.value else ""
        if kind.endswith("KW_ONLY"):
            keyword_only = True
        elif "ClassVar" in kind or "init=False" in default:
            continue
        elif keyword_only or "kw_only=True" in default:
            is_call = default.split("(")[0].endswith("field")
            required = "default" not in default if is_call else not default
            options[name] = Option(statement.annotation, required, module)
    return options
