"""What a target takes is read from its source, and values are fitted to the annotations."""

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from rl.config import ConfigError, build, check
from rl.signatures import read, source

BASE = """
import does_not_exist_anywhere
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar, Literal, Optional

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

class Plain(Base):
    pass

class Written:
    def __init__(self, folder, *, size: int, speed: Speed = "slow") -> None: ...

class Mixed(Written):
    def method(self, *, other: int): ...

@dataclass
class HalfPositional:
    folder: str
    _: KW_ONLY
    steps: int

async def call(tokens, scale=1, *, low: float, high: "float | None" = None): ...
"""

IMPORTING = """
from knobs_base import Derived as Renamed, Speed, call

class Child(Renamed):
    pass

def use(*, speed: Speed): ...
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; modules written there can be targets."""
    monkeypatch.syspath_prepend(str(tmp_path))
    read.cache_clear()
    source.cache_clear()
    (tmp_path / "knobs_base.py").write_text(BASE)
    (tmp_path / "knobs_importing.py").write_text(IMPORTING)
    invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("knobs_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "required", "optional", "positional"),
    [
        ("knobs_base.Base", ["steps"], ["rate"], []),
        ("knobs_base.Derived", ["rate", "steps"], ["names"], []),
        ("knobs_base.Plain", ["steps"], ["rate"], []),
        ("knobs_base.Written", ["size"], ["speed"], ["folder"]),
        ("knobs_base.Mixed", ["size"], ["speed"], ["folder"]),
        ("knobs_base.HalfPositional", ["steps"], [], ["folder"]),
        ("knobs_base.call", ["low"], ["high"], ["tokens", "scale"]),
        ("knobs_importing.Child", ["rate", "steps"], ["names"], []),
        ("knobs_importing.call", ["low"], ["high"], ["tokens", "scale"]),
    ],
)
def test_knobs_are_read_without_importing_the_module(
    modules: Path, target: str, required: list[str], optional: list[str], positional: list[str]
) -> None:
    signature = read(target)
    assert sorted(k for k, knob in signature.knobs.items() if knob.required) == required
    assert sorted(k for k, knob in signature.knobs.items() if not knob.required) == optional
    assert list(signature.positional) == positional
    assert "knobs_base" not in sys.modules


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("cispo", "'cispo' is not of the form module.name"),
        ("losses.cipso.cispo", "there is no module losses.cipso: did you mean losses.cispo?"),
        ("losses.cispo.cipso", "has no function or class 'cipso': did you mean cispo?"),
        ("nowhere_at_all.f", "there is no module nowhere_at_all"),
        ("knobs_base.Speed", "no function or class 'Speed'"),
    ],
)
def test_a_target_that_is_not_there_is_named(modules: Path, target: str, said: str) -> None:
    with pytest.raises(LookupError) as caught:
        read(target)
    assert said in str(caught.value)


def shipped_targets() -> list[str]:
    conf = Path(__file__).parents[2] / "conf"
    lines = [line for path in conf.rglob("*.yaml") for line in path.read_text().splitlines()]
    found = {line.split()[-1] for line in lines if line.strip().startswith("_target_:")}
    return sorted(target for target in found if not target.startswith("rl.launch"))


@pytest.mark.parametrize("target", shipped_targets())
def test_reading_a_shipped_target_finds_what_importing_it_finds(target: str) -> None:
    module, _, name = target.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), name)).parameters
    knobs = {
        key: parameter.default is inspect.Parameter.empty
        for key, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    assert {key: knob.required for key, knob in read(target).knobs.items()} == knobs


def take(modules: Path, annotation: str) -> str:
    """A function with one knob `x` of this annotation; its target."""
    name = f"knobs_x{len(list(modules.iterdir()))}"
    (modules / f"{name}.py").write_text(
        "from collections.abc import Mapping, Sequence\n"
        "from pathlib import Path\n"
        "from typing import Any, Literal, Optional, Union\n"
        "Alias = Literal['slow', 'fast']\n"
        "class Part:\n    def __init__(self, *, size: int) -> None: self.size = size\n"
        "def part(*, size: int): return size\n"
        f"def f(*, x: {annotation}): return x\n"
    )
    invalidate_caches()
    return f"{name}.f"


@pytest.mark.parametrize(
    ("annotation", "value", "becomes"),
    [
        ("int", 3, 3),
        ("float", 5, 5.0),
        ("float", 1e-6, 1e-6),
        ("bool", True, True),
        ("str", "3", "3"),
        ("int | None", None, None),
        ("None | float", 2, 2.0),
        ("Optional[int]", None, None),
        ("Union[int, str]", "a", "a"),
        ("float | int", 3, 3),
        ("float | str", 3, 3.0),
        ("'int | None'", 4, 4),
        ("Literal['a', 'b']", "b", "b"),
        ("Literal[1, None]", None, None),
        ("Alias", "fast", "fast"),
        ("list[float]", [1, 2], [1.0, 2.0]),
        ("Sequence[str]", ["a"], ["a"]),
        ("tuple[float, ...]", [1, 2], (1.0, 2.0)),
        ("tuple[int, str]", [1, "a"], (1, "a")),
        ("tuple", [1], (1,)),
        ("dict[str, float]", {"exact": 1}, {"exact": 1.0}),
        ("Mapping[str, list[int]]", {"a": [1]}, {"a": [1]}),
        ("Path", "a/b", Path("a/b")),
        ("Any", {"a": [1, None]}, {"a": [1, None]}),
        ("unheard.Of", 3, 3),
    ],
)
def test_a_value_becomes_what_its_annotation_says(
    modules: Path, annotation: str, value: Any, becomes: Any
) -> None:
    if annotation == "unheard.Of":
        annotation = "'unheard.Of'"
    made = build({"_target_": take(modules, annotation), "x": value})()
    assert made == becomes
    assert type(made) is type(becomes)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        ("int", True, "is true where a whole number is wanted"),
        ("int", 3.0, "write 3"),
        ("int", "3", 'is the text "3" where a whole number is wanted: no quotes'),
        ("int", None, "is null where a whole number is wanted"),
        ("float", False, "is false where a number is wanted"),
        ("float", float("nan"), "is nan where a finite number is wanted"),
        ("float", float("inf"), "is inf where a finite number is wanted"),
        ("bool", 1, "is 1 where true or false is wanted"),
        ("str", 3, "put it in quotes"),
        ("int | None", "many", 'is "many" where a whole number is wanted (or null)'),
        ("int | str", [1], "where a whole number or text is wanted"),
        ("Literal['slow', 'fast']", "fats", "can only be slow or fast: did you mean fast?"),
        ("Literal[1, 2]", True, "can only be 1 or 2"),
        ("Alias", "quick", "can only be slow or fast"),
        ("list[int]", [1, "a"], 'has an item 1 that is "a" where a whole number is wanted'),
        ("list[int]", 1, "where a list (list[int]) is wanted"),
        ("tuple[int, str]", [1], "where a list (tuple[int, str]) is wanted"),
        ("dict[str, float]", {"exact": "x"}, 'has an item "exact" that is "x"'),
        ("Mapping[str, float]", [1], "where a mapping (Mapping[str, float]) is wanted"),
        ("Part", {"size": 3}, "where a node with _target_ (for Part) is wanted"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_words(
    modules: Path, annotation: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"_target_": take(modules, annotation), "x": value})
    assert said in str(caught.value)


def test_a_nested_node_is_built_first_and_a_class_among_them_is_instantiated(modules: Path) -> None:
    target = take(modules, "Any")
    module = target.removesuffix(".f")
    part, function = (
        {"_target_": f"{module}.Part", "size": 3},
        {"_target_": f"{module}.part", "size": 4},
    )
    made = build({"_target_": target, "x": {"one": part, "two": [function]}})()
    assert made["one"].size == 3
    assert made["two"][0]() == 4


def test_a_nested_node_is_checked_with_its_whole_path(
    modules: Path, config: dict[str, Any]
) -> None:
    module = take(modules, "Any").removesuffix(".f")
    config["env"] = {
        "_target_": f"{module}.f",
        "x": [{"_target_": f"{module}.Part", "sise": 3, "size": "big"}],
    }
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert 'env.x.0.size is "big" where a whole number is wanted' in caught.value.problems
    assert f"env.x.0.sise is no key of {module}.Part: did you mean size?" in caught.value.problems


def test_what_the_code_supplies_may_not_be_in_yaml(config: dict[str, Any]) -> None:
    config["loss"]["tokens"] = 3
    with pytest.raises(ConfigError, match=r"loss\.tokens .*the code supplies it, so leave it out"):
        check(config)
