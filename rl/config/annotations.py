"""Convert values from YAML to annotations: 5 for a float becomes 5.0.

    int float bool str Path None   X | Y   Literal[...]   list[X] Sequence[X] tuple[X, ...]
    dict[str, X] Mapping Any   a class, a Callable[...]: a nested node with a `_target_` of its own

A bool is not accepted as an int, nor text as a number, nor NaN or infinity as a float. Names of
other types accept any value, which the called function checks itself.
"""

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.signatures import Module, did_you_mean, find

Node = dict[str, Any]
"""A mapping with `_target_`. An option annotated `Node`, or with a class, must be one."""

NodeHandler = Callable[[Node, str], Any]
"""Called with each nested node and its path; it checks or builds the node."""

LISTS = {"list", "List", "Sequence", "Collection", "Iterable"}
TUPLES = {"tuple", "Tuple"}
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping"}
SCALARS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}


class Misfit(ValueError):
    """The value does not fit; the message continues a sentence that begins with the key."""


@dataclass(frozen=True)
class Converter:
    """Converts values to annotations that were written in one module."""

    module: Module
    node: NodeHandler

    def convert(self, value: Any, kind: ast.expr | None, path: str) -> Any:
        """Return the value converted to the annotation. Misfit if it does not fit."""
        match kind:
            case ast.Constant(value=str(text)):  # a quoted annotation
                return self.convert(value, ast.parse(text, mode="eval").body, path)
            case ast.Constant(value=None):
                return _require(value is None, value, "null")
            case ast.BinOp(op=ast.BitOr()):
                return self._union(value, _alternatives(kind), path)
            case ast.Subscript():
                return self._subscript(value, kind, path)
            case ast.Attribute(attr=name) | ast.Name(id=name):
                return self._named(value, name, path)
        return nested(value, path, self.node)

    def _named(self, value: Any, name: str, path: str) -> Any:
        """Convert to a bare name: a builtin, an alias or a class."""
        if name in SCALARS:
            return _scalar(value, name)
        if name == "Path":
            return Path(_scalar(value, "str"))
        if name in LISTS | TUPLES:
            items = nested(
                _require(isinstance(value, list | tuple), value, "a list"), path, self.node
            )
            return tuple(items) if name in TUPLES else items
        if name in MAPPINGS:
            return nested(_require(isinstance(value, dict), value, "a mapping"), path, self.node)
        if name == "Node":
            return nested(_require(is_node(value), value, "a node with _target_"), path, self.node)
        meaning = None if name in {"Any", "object"} else find(self.module, name)
        match meaning:
            # The names in an alias are looked up in the module that defines it.
            case origin, ast.Assign(value=alias) | ast.AnnAssign(value=ast.expr() as alias):
                return Converter(origin, self.node).convert(value, alias, path)
            case _, ast.ClassDef():
                _require(is_node(value), value, f"a node with _target_ (for {name})")
        return nested(value, path, self.node)

    def _subscript(self, value: Any, kind: ast.Subscript, path: str) -> Any:
        """Convert to X[...]: Literal, Optional, Union, Annotated, and containers item by item."""
        name = ast.unparse(kind.value).rpartition(".")[2]
        inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        if name == "Literal":
            return _literal(value, [ast.literal_eval(item) for item in inner])
        if name in {"Optional", "Union"}:
            return self._union(value, [*inner, *[ast.Constant(None)] * (name == "Optional")], path)
        if name == "Annotated":
            return self.convert(value, inner[0], path)
        if name == "Callable":
            return nested(_require(is_node(value), value, "a node with _target_"), path, self.node)
        if name in MAPPINGS:
            _require(isinstance(value, dict), value, describe(kind))
            return {key: self._item(item, inner[-1], path, key) for key, item in value.items()}
        if name not in LISTS | TUPLES:
            return nested(value, path, self.node)
        _require(isinstance(value, list | tuple), value, describe(kind))
        kinds = [item for item in inner if ast.unparse(item) != "..."]
        if name in TUPLES and len(kinds) == len(inner):  # tuple[X, Y]: one type for each position
            _require(len(value) == len(kinds), value, describe(kind))
        else:
            kinds = kinds * len(value)
        items = [self._item(item, kinds[i], path, i) for i, item in enumerate(value)]
        return tuple(items) if name in TUPLES else items

    def _item(self, value: Any, kind: ast.expr, path: str, key: Any) -> Any:
        """Convert one item of a container; a misfit names the item."""
        try:
            return self.convert(value, kind, f"{path}.{key}")
        except Misfit as misfit:
            raise Misfit(f"has an item {shown(key)} that {misfit}") from None

    def _union(self, value: Any, kinds: list[ast.expr], path: str) -> Any:
        """Return the first alternative that fits, preferably one that keeps the value's type."""
        fits: list[Any] = []
        misfits: list[Misfit] = []
        for kind in kinds:
            try:
                fits.append(self.convert(value, kind, path))
            except Misfit as misfit:
                misfits.append(misfit)
        if fits:
            # 5 fits `float | int` twice, and must not become 5.0.
            return next((fit for fit in fits if type(fit) is type(value)), fits[0])
        real = [m for kind, m in zip(kinds, misfits, strict=True) if ast.unparse(kind) != "None"]
        if len(real) == 1:
            raise Misfit(f"{real[0]} (or null)")
        raise Misfit(f"is {shown(value)} where {' or '.join(map(describe, kinds))} is wanted")


def is_node(value: Any) -> bool:
    """Whether a value is a node of the configuration."""
    return isinstance(value, dict) and "_target_" in value


def nested(value: Any, path: str, node: NodeHandler) -> Any:
    """Return the value with every node in it, at any depth, passed through `node`."""
    if is_node(value):
        return node(value, path)
    if isinstance(value, dict):
        return {key: nested(item, f"{path}.{key}", node) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [nested(item, f"{path}.{i}", node) for i, item in enumerate(value)]
    return value


def _scalar(value: Any, name: str) -> Any:
    """Convert to an int, float, bool or str; only an int is also accepted as a float."""
    match name, value:
        case ("bool", bool()) | ("str", str()):
            return value
        case "int" | "float", bool():
            pass  # true is not 1
        case "int", int():
            return value
        case "int", float() if value.is_integer():
            raise Misfit(f"is {value} where a whole number is wanted: write {int(value)}")
        case "float", float() if not math.isfinite(value):
            raise Misfit(f"is {value} where a finite number is wanted")
        case "float", int() | float():
            return float(value)
        case "int" | "float", str() if _is_number(value):
            raise Misfit(f"is the text {shown(value)} where {SCALARS[name]} is wanted: no quotes")
        case "str", int() | float():
            raise Misfit(_as_text(value))
    return _require(False, value, SCALARS[name])


def _as_text(value: Any) -> str:
    """Return how to quote a value as text; a shell removes one pair of quotes."""
    quoted = f"=\"'{shown(value)}'\""
    return f"is {shown(value)} where text is wanted: put it in quotes, in a shell {quoted}"


def _literal(value: Any, options: list[Any]) -> Any:
    for option in options:
        if value == option and type(value) is type(option):
            return value
    names = [shown(option).strip('"') for option in options]
    hint = did_you_mean(value, names) if isinstance(value, str) else ""
    raise Misfit(f"is {shown(value)}, but it can only be {' or '.join(names)}{hint}")


def _alternatives(kind: ast.expr) -> list[ast.expr]:
    """Return X | Y | Z as a list."""
    if isinstance(kind, ast.BinOp):
        return [*_alternatives(kind.left), *_alternatives(kind.right)]
    return [kind]


def describe(kind: ast.expr) -> str:
    """Return an annotation in words."""
    text = ast.unparse(kind)
    name = text.partition("[")[0].rpartition(".")[2]
    if name in LISTS | TUPLES | MAPPINGS:
        return f"a {'mapping' if name in MAPPINGS else 'list'} ({text})"
    return "null" if text == "None" else SCALARS.get(name, text)


def shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{value}"' if isinstance(value, str) else str(value)


def _require(condition: bool, value: Any, description: str) -> Any:
    if not condition:
        raise Misfit(f"is {shown(value)} where {description} is wanted")
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
