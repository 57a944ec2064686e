"""What a target says of itself, and what it reads, found in its source: nothing is imported.

Rules go by such facts and never by a target's name, so whatever a user writes is understood too.

    class Imitator:        uses_vllm: ClassVar[bool] = False     of the class and its subclasses
    losses/gspo.py         PER_SEQUENCE = True                   of every function of the file
    losses/advantages.py   COMPARES = ("group_mean", "rloo")     of those named

What a function calls counts as its own, through helpers and imports, whoever wrote them; libraries
are not looked into. A mark that its own file states has the last word.
"""

import ast
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rl.config.signatures import (
    Definition,
    Module,
    bases,
    imported,
    meaning,
    resolve,
    source,
    spec_of,
)

Config = Mapping[str, Any]

RATIO = {"anchor", "rollout_logprobs", "old_logprobs"}
ADVANTAGES = {"advantages"}
CANDIDATES = {"candidate_logprobs", "ref_candidate_logprobs"}
REFERENCE = {"ref_logprobs"} | CANDIDATES
LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
PROPERTIES = ("property", "cached_property")
OUR_PACKAGES = ("rl", "losses", "envs")  # looked into even where they are installed


def uses_ratio(loss: str) -> bool:
    """Whether a loss reads the probability that its tokens were sampled with."""
    return reads(loss, RATIO)


def takes_any_text(loss: str) -> bool:
    """Whether it is all one to a loss who chose the tokens: no reward, no ratio, no estimate."""
    return not reads(loss, ADVANTAGES | RATIO | (REFERENCE - CANDIDATES))


def is_supervised(loss: str) -> bool:
    """Whether a loss learns from the tokens alone: not even from a reference."""
    return takes_any_text(loss) and not compares_distributions(loss)


def compares_distributions(loss: str) -> bool:
    """Whether a loss reads the logprobs of candidates beside the sampled token."""
    return reads(loss, CANDIDATES)


def is_imitator(sampler: str) -> bool:
    """Whether the text of a sampler was sampled by no policy, so that no vLLM is started."""
    return not fact(sampler, "uses_vllm", True)


def spans_hosts(cluster: Mapping[str, Any]) -> bool:
    """Whether parts of a run may be on different machines, so that none of its wires is a file."""
    return fact(cluster["_target_"], "spans_hosts", False)


def is_by_hand(cluster: Mapping[str, Any]) -> bool:
    """Whether somebody else starts the parts of a run, and has to be told when it is over."""
    return fact(cluster["_target_"], "by_hand", False)


def is_external(inference: Mapping[str, Any] | None) -> bool:
    """Whether somebody else started the vLLMs, so that they may be anywhere."""
    return bool(inference) and fact(inference["_target_"], "is_external", False)


def takes_turns(target: str) -> bool:
    """Whether an advantage or an aggregation takes what belongs to each turn, not to a rollout."""
    return is_marked(target, "PER_TURN")


def needs_reference(config: Config) -> bool:
    """Whether the loss or a penalty reads the logprobs of a reference."""
    return config["kl"]["beta"] > 0 or reads(config["loss"]["_target_"], REFERENCE)


def references(config: Config) -> dict[str, Mapping[str, Any]]:
    """The references by dotted path: one, one for each environment of a mixture, or none."""
    if (node := config.get("reference")) is None:  # an evaluation trains nothing
        return {}
    if not isinstance(teachers := node.get("teachers"), Mapping):
        return {"reference": node}
    return {f"reference.teachers.{name}": teacher for name, teacher in teachers.items()}


def sees_hint(config: Config, env: str) -> bool:
    """Whether the reference of an environment's rows is one that sees hints, and is read."""
    nodes = references(config)
    node = nodes.get("reference", nodes.get(f"reference.teachers.{env}", {}))
    return bool(node.get("sees_hint")) and needs_reference(config)


def fact(target: str, name: str, default: Any) -> Any:
    """The value of a class's attribute, inherited ones included, or of a constant of the file."""
    value = _stated(*_reached(*_place_of(target))[0], name)
    return default if value is None else value


def is_marked(target: str, name: str) -> bool:
    """Whether a target, or else something that it calls, is marked: True, or the names of those."""
    for i, (module, statement) in enumerate(_reached(*_place_of(target))):
        mark = _stated(module, statement, name)
        if isinstance(mark, tuple | list | set):
            mark = getattr(statement, "name", None) in mark
        if mark or (mark is not None and i == 0):
            return bool(mark)
    return False


def reads(target: str, attributes: set[str]) -> bool:
    """Whether a target, or something that it calls, reads one of these attributes of anything."""
    return not attributes.isdisjoint(_all_read(*_place_of(target)))


def _place_of(target: str) -> tuple[Module, str]:
    """The module of a target and its name there."""
    name, _, attribute = target.rpartition(".")
    module = source(name)
    assert module, f"{target} was found before"
    return module, attribute


@cache
def _all_read(module: Module, name: str) -> frozenset[str]:
    """Every attribute that is read, of anything."""
    nodes = (node for _, statement in _reached(module, name) for node in _code(statement))
    return frozenset(name for node in nodes for name in _names_read(node))


def _stated(module: Module, statement: ast.stmt, name: str) -> Any:
    """What a class or the file of a function says under a name; None where nothing is said."""
    if not isinstance(statement, ast.ClassDef):
        return _constant(module.statements(), name)
    value = _constant(statement.body, name)
    inherited = (_stated(*base, name) for base in bases(module, statement))
    return value if value is not None else next((v for v in inherited if v is not None), None)


def _constant(statements: Iterator[ast.stmt] | list[ast.stmt], name: str) -> Any:
    for statement in statements:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=target)], value=value)
                | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
            ) if target == name:
                try:
                    return ast.literal_eval(value)
                except ValueError:
                    return None  # worked out at run time
    return None


@cache
def _reached(origin: Module, name: str) -> list[tuple[Module, ast.stmt]]:
    """The definition of a target, then those of everything that its code names."""
    start = resolve(origin, name)
    assert start, f"{origin.name}.{name} was found before"
    home = _package(start[0].name)  # a user's losses may be an installed package
    # By id: `source` keeps each parsed file, so a statement stays one and the same object.
    reached, stack, seen = [], [start], {id(start[1])}
    while stack:
        module, statement = stack.pop()
        reached.append((module, statement))
        for entry in _named(module, statement, home):
            package = _package(entry[0].name)
            if id(entry[1]) not in seen and (package == home or not _is_library(package)):
                seen.add(id(entry[1]))
                stack.append(entry)
    return reached


def _named(module: Module, statement: ast.stmt, home: str) -> Iterator[tuple[Module, ast.stmt]]:
    """What the names in a statement mean, those of its own variables excepted."""
    nodes = list(_code(statement))
    skipped = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    skipped |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):  # inside of a function
            # As if the import stood alone in a file, for `resolve` looks at top levels only.
            inner = Module(module.name, module.path, ast.Module([node], []))
            entries = [resolve(inner, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.Name | ast.Attribute):
            root = ast.unparse(node).partition(".")[0]
            origins = {_package(origin) for origin, _ in imported(module, root)} - {home}
            foreign = root in skipped or any(_is_library(origin) for origin in origins)
            entries = [] if foreign else [meaning(module, node)]
        else:
            continue
        yield from filter(None, entries)
    if isinstance(statement, ast.ClassDef):
        yield from bases(module, statement)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it; not annotations, which run nothing, nor properties, unless read."""
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            runs = field not in ("annotation", "returns") and not _is_property(child)
            if runs and isinstance(child, ast.AST):
                yield from _code(child)


def _is_property(node: ast.AST) -> bool:
    return isinstance(node, Definition) and any(
        ast.unparse(decorator).rpartition(".")[2] in PROPERTIES for decorator in node.decorator_list
    )


def _names_read(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(attr=name, ctx=ast.Load()):
            return [name]
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [name]
        case ast.MatchClass(kwd_attrs=names):
            return names
    return []


@cache
def _is_library(package: str) -> bool:
    """Whether a top-level package came with Python or was installed."""
    if package in OUR_PACKAGES:
        return False
    spec = spec_of(package)
    places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
    # What is built into the interpreter has a spec but no file, and is a library too.
    files = [Path(place) for place in places if place and Path(place).is_absolute()]
    return any(file.is_relative_to(folder) for file in files for folder in LIBRARIES) or not files
