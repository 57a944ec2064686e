"""Nodes: what a target takes, how values become its options, and how it is built."""

import sys
from importlib import invalidate_caches
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.config.build import build, construct
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.config.signatures import options_of
from tests.support.composing import changed, composed, only_problem

BASE = """
import does_not_exist_anywhere
from dataclasses import dataclass, field
from typing import ClassVar, Literal
Speed = Literal["slow", "fast"]
@dataclass(frozen=True, kw_only=True)
class Base:
    kind: ClassVar[str] = "base"
    steps: int
    rate: float = 0.1
    made: int = field(init=False, default=0)
@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    rate: float
    names: list[str] = field(default_factory=list)
class Written:
    def __init__(self, folder, *, size: int, speed: Speed = "slow") -> None: ...
async def call(tokens, scale=1, *, low: float, high: "float | None" = None): ...
"""
IMPORTING = """
from knobs_base import Derived as Renamed, Written
class Child(Renamed):
    def method(self, *, other: int): ...
class Written(Written): ...
"""


@pytest.mark.parametrize(
    ("target", "required", "optional"),
    [
        ("knobs_base.Derived", ["rate", "steps"], ["names"]),
        ("knobs_base.Written", ["size"], ["speed"]),
        ("knobs_base.call", ["low"], ["high"]),
        ("knobs_importing.Child", ["rate", "steps"], ["names"]),
        ("knobs_importing.Written", ["size"], ["speed"]),
    ],
)
def test_options_are_read_without_importing_the_module(target, required, optional, modules):
    (modules / "knobs_base.py").write_text(BASE)
    (modules / "knobs_importing.py").write_text(IMPORTING)
    options = options_of(target)
    assert sorted(key for key, option in options.items() if option.required) == required
    assert sorted(key for key, option in options.items() if not option.required) == optional
    assert "knobs_base" not in sys.modules


def take(modules: Path, annotation: str) -> str:
    """Write a function with one option `x` of this annotation and return its target."""
    name = f"knobs_x{len(list(modules.iterdir()))}"
    (modules / f"{name}.py").write_text(
        "from collections.abc import Mapping, Sequence\n"
        "from pathlib import Path\n"
        "from typing import Annotated, Any, Literal, Optional, Union\n"
        "from msgspec import Meta\n"
        "Alias = Literal['slow', 'fast']\n"
        "Rate = Annotated[float, Meta(gt=0, le=1)]\n"
        "class Part:\n    def __init__(self, *, size: int) -> None: self.size = size\n"
        "def part(*, size: int): return size\n"
        f"def f(*, x: {annotation}): return x\n"
    )
    invalidate_caches()
    return f"{name}.f"


@pytest.mark.parametrize(
    ("annotation", "value", "becomes"),
    [
        ("float", 5, 5.0),
        ("None | float", 2, 2.0),
        ("'int | None'", 4, 4),
        ("Literal[1, None]", None, None),
        ("Alias", "fast", "fast"),
        ("Rate", 1, 1.0),
        ("list[float]", [1, 2], [1.0, 2.0]),
        ("tuple[float, ...]", [1, 2], (1.0, 2.0)),
        ("tuple[int, str]", [1, "a"], (1, "a")),
        ("Mapping[str, list[int]]", {"a": [1]}, {"a": [1]}),
        ("Path", "a/b", Path("a/b")),
        ("Any", {"a": [1, None]}, {"a": [1, None]}),
        ("'unheard.Of'", 3, 3),
    ],
)
def test_a_value_becomes_what_its_annotation_says(modules, annotation, value, becomes):
    made = build({"_target_": take(modules, annotation), "x": value})()
    assert made == becomes
    assert type(made) is type(becomes)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        ("int", True, "is true, expected int"),
        ("list[float]", [float("inf")], "x.0 is inf, expected a finite number"),
        ("Rate", 0, "=0, but it must be > 0"),
        ("Rate | None", 1.5, "=1.5, but it must be <= 1"),
        ("list[int]", [1, "a"], 'x.1 is "a", expected int'),
        ("tuple[int, str]", [1], "is [1], expected list of length 2"),
        ("dict[str, float]", {"exact": "x"}, 'x.exact is "x", expected float'),
        ("Part", {"size": 3}, 'is {"size": 3}, expected a node with _target_'),
        ("Part | int", "x", 'is "x", expected int, or a node with _target_'),
        ("int", {"_target_": "a.b"}, "is a node, expected int"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(modules, annotation, value, said):
    with pytest.raises(ValueError, match=r"expected|must be") as caught:
        build({"_target_": take(modules, annotation), "x": value})
    assert said in str(caught.value)


def test_a_nested_node_is_built_first_and_a_class_among_them_is_instantiated(modules):
    target = take(modules, "Any")
    module = target.removesuffix(".f")
    part = {"_target_": f"{module}.Part", "size": 3}
    function = {"_target_": f"{module}.part", "size": 4}
    made = build({"_target_": target, "x": {"one": part, "two": [function]}})()
    assert made["one"].size == 3
    assert made["two"][0]() == 4
    union = take(modules, "Part | int")
    assert build({"_target_": union, "x": part})().size == 3
    assert build({"_target_": union, "x": 5})() == 5


def test_a_nested_node_is_checked_with_its_whole_path(modules, config):
    module = take(modules, "Any").removesuffix(".f")
    part = {"_target_": f"{module}.Part", "sise": 3, "size": "big"}
    config["env"] = {"_target_": f"{module}.f", "x": [part]}
    with pytest.raises(ConfigError) as caught:
        check(config)
    said = f"env.x.0.sise is not a key of {module}.Part: did you mean size?"
    assert {said, 'env.x.0.size is "big", expected int'} <= set(caught.value.problems)


OWN = """
from rl.rollouts.example_order import ExampleOrder
class Forgetful(ExampleOrder):
    def observe(self, place, group): ...
class Needy:
    def check_machine(self): raise OSError("no sandbox")
"""


def test_an_order_that_would_forget_and_an_unusable_machine_are_refused(modules):
    (modules / "knobs_own.py").write_text(OWN)
    nodes = {"order": "Forgetful", "env": "Needy", "client": "Needy"}
    run = {key: {"_target_": f"knobs_own.{name}"} for key, name in nodes.items()}
    with pytest.raises(ConfigError) as caught:
        construct(SimpleNamespace(**run, reference=None), [*run, "reference"])
    order, env = caught.value.problems
    assert order == (
        "order: Forgetful observes groups, but a resumed run would lose its state: define "
        "state() and load()"
    )
    assert env == "env: OSError: no sandbox"


def test_a_syntax_error_in_a_users_file_is_reported_with_its_line(modules):
    (modules / "knobs_slip.py").write_text("def loss(tokens):\n    return (\n")
    problem = only_problem(changed(composed(), {"loss": {"_target_": "knobs_slip.loss"}}))
    assert problem == f"{modules}/knobs_slip.py, line 2: '(' was never closed"
