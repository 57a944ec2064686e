"""What a `_target_` takes, read from its source: a target may import torch, a check may not wait.

    @dataclass(frozen=True, kw_only=True)     def cispo(tokens: Tokens, *, clip_low: float): ...
    class Reverse(Environment):                         |                '- knobs: from YAML
        min_length: int                                 '- positional: supplied by code

Keyword-only parameters are the knobs of a function and of a class's `__init__`, keyword-only fields
those of a dataclass. A class with a method `configure`, inherited or not, has that one's as well.
Nothing is imported here, not even the packages on the way.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


# Compared by identity, so that what is cached by a module need not hash its tree.
@dataclass(frozen=True, eq=False)
class Module:
    """One parsed source file."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """What a relative import starts from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    def statements(self) -> Iterator[ast.stmt]:
        """Top-level statements, those inside `if` and `try` included."""
        stack = self.tree.body[::-1]
        while stack:
            statement = stack.pop()
            yield statement
            if isinstance(statement, ast.If | ast.Try):
                stack += reversed([*statement.body, *statement.orelse])


@dataclass(frozen=True, eq=False)
class Knob:
    """One keyword-only parameter."""

    annotation: ast.expr | None
    required: bool  # has no default
    module: Module  # where the annotation's names mean something


@dataclass(frozen=True, eq=False)
class Signature:
    """What a target takes."""

    knobs: dict[str, Knob]
    positional: tuple[str, ...]
    is_class: bool
    configured: frozenset[str] = frozenset()  # knobs that the method `configure` takes


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`: did you mean x?` with the closest known word, or nothing where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


@cache
def source(name: str) -> Module | None:
    """The parsed file of a module, or None where there is no such Python file."""
    spec = spec_of(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    return Module(name, path, ast.parse(path.read_bytes(), filename=str(path)))


def spec_of(name: str) -> ModuleSpec | None:
    """Like importlib.util.find_spec, which would import the packages above."""
    top, *rest = name.split(".")
    # The top is looked up, not run; below it `find_spec` would run each package's __init__.
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a spec, __main__ for one
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(f"{spec.name}.{part}", path)
    return spec


def resolve(module: Module, name: str) -> tuple[Module, ast.stmt] | None:
    """The statement that gives a top-level name its meaning, followed through imports."""
    for statement in module.statements():
        if isinstance(statement, Definition) and statement.name == name:
            return module, statement
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                return module, statement
            case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                return module, statement
    for origin, there in imported(module, name):
        known = source(origin) if there else None
        if known and (entry := resolve(known, there)):
            return entry
    return None


def meaning(module: Module, expression: ast.expr) -> tuple[Module, ast.stmt] | None:
    """Like `resolve`, for `name` and for `package.module.name`."""
    match expression:
        case ast.Name(id=name):
            return resolve(module, name)
        case ast.Attribute(value=value, attr=name):
            owner = _module_named(module, value)
            origin = source(owner) if owner else None
            return resolve(origin, name) if origin else None
    return None


def _module_named(module: Module, expression: ast.expr) -> str | None:
    """The module that `name` or `package.module` is in another module."""
    match expression:
        case ast.Name(id=name):
            names = [f"{origin}.{there}".strip(".") for origin, there in imported(module, name)]
        case ast.Attribute(value=value, attr=name):
            owner = _module_named(module, value)
            names = [f"{owner}.{name}"] if owner else []
        case _:
            names = []
    return next((name for name in names if spec_of(name)), None)


def imported(module: Module, name: str) -> Iterator[tuple[str, str]]:
    """Where an import takes a name from: a module and the name there, "" for the module itself."""
    for statement in module.statements():
        match statement:
            case ast.ImportFrom():
                for alias in statement.names:
                    if alias.name == "*" or name == (alias.asname or alias.name):
                        there = name if alias.name == "*" else alias.name
                        yield _absolute(module, statement), there
            case ast.Import():
                for alias in statement.names:
                    if alias.asname == name:
                        yield alias.name, ""
                    elif not alias.asname and alias.name.partition(".")[0] == name:
                        yield name, ""


def _absolute(module: Module, statement: ast.ImportFrom) -> str:
    """The module that a `from ... import` names, its leading dots worked out."""
    if statement.level == 0:
        return statement.module or ""
    parts = module.package.split(".")
    base = parts[: len(parts) - statement.level + 1]
    return ".".join([*base, *([statement.module] if statement.module else [])])


@cache
def read(target: str) -> Signature:
    """The signature of `package.module.name`. LookupError, one sentence, where there is none."""
    name, _, attribute = target.rpartition(".")
    if not name:
        raise LookupError(f"{target!r} is not of the form module.name")
    module = source(name)
    if module is None:
        path = f"{name.replace('.', '/')}.py"
        start = f": start in the folder that holds {path}, or put that folder into PYTHONPATH"
        hint = did_you_mean(name, _siblings(name)) or start
        raise LookupError(f"there is no module {name}{hint}")
    entry = resolve(module, attribute)
    definition = entry and entry[1]
    if not entry or not isinstance(definition, Definition):
        known = (s.name for s in module.statements() if isinstance(s, Definition))
        hint = did_you_mean(attribute, known)
        raise LookupError(f"{name} has no function or class {attribute!r}{hint}")
    if isinstance(definition, ast.ClassDef):
        made = _init(entry[0], definition) or Signature({}, (), True)
        later = _method(entry[0], definition, "configure")
        # What the constructor takes is its own, though `configure` may have the name too.
        rest = {} if later is None else {k: v for k, v in later.items() if k not in made.knobs}
        return Signature(made.knobs | rest, made.positional, True, frozenset(rest))
    return _parameters(entry[0], definition.args, skip=0, is_class=False)


def _siblings(name: str) -> list[str]:
    """Modules of the package that a module was looked for in."""
    package = name.rpartition(".")[0]
    spec = spec_of(package) if package else None
    folders = spec.submodule_search_locations or [] if spec else []
    return [f"{package}.{p.stem}" for folder in folders for p in Path(folder).glob("*.py")]


def _parameters(module: Module, args: ast.arguments, *, skip: int, is_class: bool) -> Signature:
    """The signature of a def, less its first `skip` parameters (self)."""
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    knobs = {arg.arg: Knob(arg.annotation, default is None, module) for arg, default in pairs}
    positional = tuple(arg.arg for arg in [*args.posonlyargs, *args.args][skip:])
    return Signature(knobs, positional, is_class)


def _init(module: Module, definition: ast.ClassDef) -> Signature | None:
    """The signature of the `__init__` that Python would call, written out or made by @dataclass."""
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _parameters(module, statement.args, skip=1, is_class=True)
    if _dataclass_options(definition) is not None:
        return _fields(module, definition)
    inherited = (_init(*base) for base in bases(module, definition))
    return next((signature for signature in inherited if signature), None)


def _method(module: Module, definition: ast.ClassDef, name: str) -> dict[str, Knob] | None:
    """The keyword-only parameters of a class's own or inherited method; None where it has none."""
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return _parameters(module, statement.args, skip=1, is_class=True).knobs
    inherited = (_method(*base, name) for base in bases(module, definition))
    return next((knobs for knobs in inherited if knobs is not None), None)


def bases(module: Module, definition: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
    """The classes that a class inherits from, where they are written in Python."""
    for base in definition.bases:
        while isinstance(base, ast.Subscript):  # Base[T]
            base = base.value
        entry = meaning(module, base)
        if entry and isinstance(entry[1], ast.ClassDef):
            yield entry[0], entry[1]


def _dataclass_options(definition: ast.ClassDef) -> dict[str, bool] | None:
    """Keywords of the @dataclass decorator; None where there is none."""
    for decorator in definition.decorator_list:
        if ast.unparse(decorator).split("(")[0].endswith("dataclass"):
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {k.arg: ast.unparse(k.value) == "True" for k in keywords if k.arg}
    return None


def _fields(module: Module, definition: ast.ClassDef) -> Signature:
    """The signature @dataclass writes: the bases' fields first; keyword-only ones are the knobs."""
    knobs: dict[str, Knob] = {}
    positional: list[str] = []
    for base_module, base in reversed(list(bases(module, definition))):
        if _dataclass_options(base) is not None:
            inherited = _fields(base_module, base)
            knobs |= inherited.knobs
            positional += inherited.positional
    keyword_only = (_dataclass_options(definition) or {}).get("kw_only", False)
    for statement in definition.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, kind = statement.target.id, ast.unparse(statement.annotation)
        keyword_only = keyword_only or kind.endswith("KW_ONLY")
        field = _field(statement.value)
        if "ClassVar" in kind or kind.endswith("KW_ONLY") or field.get("init") == "False":
            continue
        if field.get("kw_only", str(keyword_only)) == "True":
            required = field.keys().isdisjoint({"default", "default_factory"})
            knobs[name] = Knob(statement.annotation, required, module)
        elif name not in positional:
            positional.append(name)
    return Signature(knobs, tuple(positional), True)


def _field(value: ast.expr | None) -> dict[str, str]:
    """What follows the `=` of a field, as the keywords of `field(...)`."""
    if value is None:
        return {}
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        return {k.arg: ast.unparse(k.value) for k in value.keywords if k.arg}
    return {"default": ast.unparse(value)}
