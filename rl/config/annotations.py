"""Convert YAML values to the annotated types of options with msgspec: 5 becomes 5.0 for a float.

The following annotations are supported:

    int   float | None   Literal["a", "b"]   list[str]   Mapping[str, float]   tuple[int, ...]
    Annotated[float, Meta(gt=0, le=1)]       a number in a range (rl/config/ranges.py)
    a class, a Callable[...]                 a nested node with its own `_target_`

This module evaluates the source text of an annotation without importing its file. A name that
cannot be resolved counts as Any, which accepts every value.
"""

import ast
import builtins
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import msgspec

from rl.config.signatures import Module, Option, did_you_mean, find_definition

Node = dict[str, Any]
"""A mapping with `_target_`. An option annotated with `Node` or a class requires such a mapping."""

NodeHandler = Callable[[Node, str], Any]
"""A function that checks or builds a nested node, given the node and its path."""


class InvalidValue(ValueError):
    """The error raised if a value does not fit an annotation; the message names the option."""


class Nested:
    """A node's type in an evaluated annotation. Instead of a node, msgspec gets `Nested()`."""

    def __class_getitem__(cls, _item: Any) -> type:
        return cls  # so that Callable[[int], str] evaluates to Nested


_KNOWN = {
    **{"Any": Any, "Annotated": Annotated, "Literal": Literal, "Meta": msgspec.Meta},
    **{"Optional": Optional, "Union": Union, "Path": Path, "Node": Nested, "Callable": Nested},
    **dict.fromkeys(("Sequence", "Collection", "Iterable", "List"), Sequence),
    **dict.fromkeys(("Mapping", "MutableMapping", "Dict"), Mapping),
    "Tuple": tuple,
}
# Our error messages replace msgspec's type names by these names.
_TYPE_NAMES = {"Nested": "a node with _target_", "object": "mapping", "array": "list"}


class _Namespace(dict[str, Any]):
    def __init__(self, module: Module) -> None:
        super().__init__(_KNOWN)
        self._module = module

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)  # eval then searches the builtins
        match find_definition(self._module, name):
            # Names in an alias are looked up in the module that defines the alias.
            case origin, ast.Assign(value=alias) | ast.AnnAssign(value=ast.expr() as alias):
                return _evaluate_annotation(ast.unparse(alias), origin)
            case _, ast.ClassDef():
                return Nested
        return Any


class _Unqualifier(ast.NodeTransformer):
    """Replaces a dotted name in an annotation by its last part: pathlib.Path becomes Path."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.Name:
        return ast.Name(node.attr)


def _evaluate_annotation(text: str, module: Module) -> Any:
    try:
        tree = _Unqualifier().visit(ast.parse(text, mode="eval"))
        kind = eval(ast.unparse(tree), {}, _Namespace(module))
    except (AttributeError, NameError, TypeError):
        return Any
    # A quoted annotation evaluates to a string, which contains the annotation itself.
    return _evaluate_annotation(kind, module) if isinstance(kind, str) else kind


def convert(value: Any, option: Option, path: str, on_node: NodeHandler) -> Any:
    """Return the value, converted to the option's annotated type, or raise InvalidValue."""
    text = ast.unparse(option.annotation) if option.annotation else "Any"
    return _convert_value(value, _evaluate_annotation(text, option.module), path, on_node)


def takes_only_int(option: Option) -> bool:
    text = ast.unparse(option.annotation) if option.annotation else "Any"
    kind = repr(_evaluate_annotation(text, option.module))
    return "int" in kind and "float" not in kind


def _convert_value(value: Any, kind: Any, path: str, on_node: NodeHandler) -> Any:
    if has_target(value):
        _convert_scalar(Nested(), kind, path)
        return on_node(value, path)
    # Convert containers item by item, because msgspec's errors do not name the key of an item.
    for member in _union_members(kind):
        origin, args = get_origin(member) or member, get_args(member)
        if isinstance(value, dict) and origin in (dict, Mapping, Any, object):
            of = args[1] if args else Any
            return {
                k: _convert_value(item, of, f"{path}.{k}", on_node) for k, item in value.items()
            }
        if isinstance(value, list | tuple) and origin in (list, tuple, Sequence, Any, object):
            kinds = args
            if args[1:] in ((), (...,)):
                kinds = [args[0] if args else Any] * len(value)
            _convert_scalar(value, tuple[(Any,) * len(kinds)], path)
            pairs = enumerate(zip(value, kinds, strict=True))
            items = [_convert_value(item, of, f"{path}.{i}", on_node) for i, (item, of) in pairs]
            return tuple(items) if origin is tuple else items
    return _convert_scalar(value, kind, path)


def _union_members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _convert_scalar(value: Any, kind: Any, path: str) -> Any:
    others, or_node = [m for m in _union_members(kind) if m is not Nested], ""
    # msgspec rejects a union of Nested and a type other than None, so leave out Nested.
    if Nested in _union_members(kind) and set(others) - {type(None)}:
        if isinstance(value, Nested):
            return value
        kind, or_node = Union[tuple(others)], ", or a node with _target_"  # noqa: UP007
    try:
        converted = msgspec.convert(value, kind, dec_hook=_as_path)
    except TypeError:  # msgspec does not support the annotated type
        return value
    except msgspec.ValidationError as error:
        raise InvalidValue(_error_message(value, kind, path, str(error)) + or_node) from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise InvalidValue(f"{path} is {value}, expected a finite number")
    return converted


def _as_path(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path and isinstance(value, str) else value


def _error_message(value: Any, kind: Any, path: str, error: str) -> str:
    if bound := re.match(r"Expected `\w+` ([<>]=?) (\S+)", error):
        return f"{path}={value}, but it must be {bound[1]} {float(bound[2]):g}"
    shown = "a node" if isinstance(value, Nested) else json.dumps(value, default=str)
    literals = [member for member in _union_members(kind) if get_origin(member) is Literal]
    names = [str(option) for member in literals for option in get_args(member)]
    if names and isinstance(value, str | int | float):
        hint = did_you_mean(value, names) if isinstance(value, str) else ""
        return f"{path} is {shown}, expected {' or '.join(names)}{hint}"
    expected = error.removeprefix("Expected ").partition(", got")[0].replace("`", "")
    expected = re.sub(r"\w+", lambda word: _TYPE_NAMES.get(word[0], word[0]), expected)
    quoted = expected.startswith("str") and isinstance(value, int | float)
    remedy = f": write it in quotes, in a shell {path}=\"'{shown}'\"" if quoted else ""
    return f"{path} is {shown}, expected {expected}{remedy}"


def has_target(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value
