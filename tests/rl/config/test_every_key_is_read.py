"""No knob is dead, and none may be missing: what conf/ says is read, and what is read is said."""

import ast
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.check import check
from rl.config.schema import ConfigError
from rl.config.signatures import Module, find, read, source
from tests.rl.config.test_shipped import CHOICES, COMPANIONS, nodes
from tests.support.composing import CONF, REPO, composed

FOLDERS = ("rl", "losses", "envs")


def targets(folder: Path) -> set[str]:
    """Every `_target_` in the YAML files of a folder, nested ones included."""
    texts = (path.read_text() for path in folder.rglob("*.yaml"))
    return {
        node["_target_"] for text in texts for _, node in nodes(yaml.safe_load(text) or {}, "x")
    }


def names_read(trees: Iterable[ast.AST]) -> set[str]:
    """What is read as an attribute, as a text key of a mapping, or by `get` and `value_of`."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    found.add(name)
                case ast.Subscript(slice=ast.Constant(value=str(name)), ctx=ast.Load()):
                    found.add(name)
                case ast.Call(
                    func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]
                ):
                    found.add(key)
                case ast.Call(func=ast.Name(id="value_of"), args=[_, ast.Constant(value=str(key))]):
                    found.add(key.rpartition(".")[2])
    return found


def interpolated(folder: Path) -> set[str]:
    """Keys that other keys refer to: learning_rate for ${model.learning_rate}."""
    texts = (path.read_text() for path in folder.rglob("*.yaml"))
    found = {key for text in texts for key in re.findall(r"\$\{([\w.]+)\}", text)}
    return {key.rpartition(".")[2] for key in found}


def method(module: Module, definition: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """The method that a class has or inherits; None where @dataclass writes it."""
    for statement in definition.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return statement
    if any("dataclass" in ast.unparse(decorator) for decorator in definition.decorator_list):
        return None
    for base in definition.bases:
        found = find(module, base.id) if isinstance(base, ast.Name) else None
        if found and isinstance(found[1], ast.ClassDef):
            inherited = method(found[0], found[1], name)
            if inherited:
                return inherited
    return None


def stored(body: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """(knob, attribute) where an `__init__` does no more than `self.attribute = knob`."""
    for node in ast.walk(body):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for left, right in pairs:
                if isinstance(left, ast.Attribute) and isinstance(right, ast.Name):
                    yield right.id, left.attr


def loads(body: ast.AST, name: str) -> int:
    """How often a name is read."""
    return sum(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
        for n in ast.walk(body)
    )


def dead_knobs(target: str, known: set[str]) -> set[str]:
    """Knobs of a target that nothing reads; `known` are the attributes and keys read anywhere."""
    module = source(target.rpartition(".")[0])
    assert module
    found = find(module, target.rpartition(".")[2])
    assert found
    origin, definition = found
    known = known | names_read([origin.tree])
    knobs = set(read(target).options)
    if isinstance(definition, ast.ClassDef):
        later = read(target).configured
        if configure := method(origin, definition, "configure"):
            assert all(loads(configure, knob) for knob in later)
        body = method(origin, definition, "__init__")
        if body is None:
            return knobs - known - later
        kept = list(stored(body))
        return {
            knob
            for knob in knobs - later
            if loads(body, knob) == sum(name == knob for name, _ in kept)  # used for nothing else
            and not {attribute for name, attribute in kept if name == knob} & known
        }
    return {knob for knob in knobs if not loads(definition, knob)}


@pytest.fixture(scope="module")
def known() -> set[str]:
    trees = [ast.parse(p.read_text()) for folder in FOLDERS for p in (REPO / folder).rglob("*.py")]
    return names_read(trees) | interpolated(CONF)


@pytest.mark.parametrize("target", sorted(targets(CONF)))
def test_every_knob_of_a_shipped_node_is_read_by_something(target: str, known: set[str]) -> None:
    assert not dead_knobs(target, known)


DEAD = """
from dataclasses import dataclass

def f(tokens, *, used: float, dead_in_f: float):
    dead_in_f = 1.0
    return tokens * used

@dataclass(frozen=True, kw_only=True)
class Fields:
    used: int
    dead_field: int

    def go(self):
        return self.used

class Written:
    def __init__(self, *, used: int, size: int, dead_dead: int, dead_stored: int) -> None:
        self._used, self.dead_attribute = used, dead_stored
        self.double = 2 * size

    def go(self):
        return self._used

class Child(Written):
    pass
"""


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("f", {"dead_in_f"}),
        ("Fields", {"dead_field"}),
        ("Written", {"dead_dead", "dead_stored"}),
        ("Child", {"dead_dead", "dead_stored"}),
    ],
)
def test_a_dead_knob_is_found(name: str, dead: set[str], modules: Path, known: set[str]) -> None:
    (modules / "knobs_dead.py").write_text(DEAD)
    assert dead_knobs(f"knobs_dead.{name}", known) == dead


def test_a_key_that_only_a_yaml_refers_to_is_read() -> None:
    assert {"learning_rate", "max_tokens", "max_seq_len"} <= interpolated(CONF)


def removals(config: dict[str, Any], group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key of a group's nodes, dotted, with the configuration that lacks it."""
    for path, node in nodes({group: config[group]}):
        for key in node:
            spoilt = deepcopy(config)
            parent = spoilt
            if key in read(node["_target_"]).configured:
                continue  # every environment has it, and does without
            if path.startswith("env.rewards.") and key == "_target_":
                continue  # fn and weight may stand there: the constructor says so
            for part in path.split("."):
                parent = parent[part]
            del parent[key]
            yield f"{path}.{key}", spoilt


OF_GROUPS = [choice for choice in CHOICES if not choice.startswith("experiment=")]


@pytest.mark.parametrize("choice", [*OF_GROUPS, "trainer=as shipped"])
def test_a_missing_key_of_any_choice_is_refused_by_name(choice: str, tmp_path: Path) -> None:
    """Keys of the free-form parts (deepspeed, inference.args) are not ours to miss."""
    group = choice.partition("=")[0]
    overrides = [] if group == "trainer" else [choice, *COMPANIONS.get(choice, [])]
    config = composed(*overrides, f"output_dir={tmp_path}")
    for key, spoilt in removals(config, group):
        with pytest.raises(ConfigError) as caught:
            check(spoilt)
        path, _, last = key.rpartition(".")
        (problem,) = caught.value.problems
        if last == "_target_":
            parent, _, item = path.rpartition(".")
            assert problem.startswith((f"{path} is ", f'{parent} has an item "{item}" that is '))
            assert "where a node with _target_ " in problem
        else:
            assert problem == f"{key} is missing: add it to the YAML that sets {path}"


def test_a_missing_key_or_group_at_the_top_is_refused_by_name(config: dict[str, Any]) -> None:
    for key in list(config):
        spoilt = {name: value for name, value in config.items() if name != key}
        with pytest.raises(ConfigError) as caught:
            check(spoilt)
        assert any(problem.startswith(f"{key} is missing: ") for problem in caught.value.problems)
