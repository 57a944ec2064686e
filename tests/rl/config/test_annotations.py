"""Values from YAML are converted to annotations, nested nodes included."""

from importlib import invalidate_caches
from pathlib import Path

import pytest

from rl.config.build import build
from rl.config.check import check
from rl.config.schema import ConfigError


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
        ("Rate", 1, 1.0),
        ("list[float]", [1, 2], [1.0, 2.0]),
        ("Sequence[str]", ["a"], ["a"]),
        ("tuple[float, ...]", [1, 2], (1.0, 2.0)),
        ("tuple[int, str]", [1, "a"], (1, "a")),
        ("tuple", [1], (1,)),
        ("dict[str, float]", {"exact": 1}, {"exact": 1.0}),
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
        ("int", 3.0, "is 3.0, expected int"),
        ("int", "3", 'is "3", expected int'),
        ("float", False, "is false, expected float"),
        ("float", float("nan"), "is nan, expected a finite number"),
        ("list[float]", [float("inf")], "x.0 is inf, expected a finite number"),
        ("str", 3, "is 3, expected str: write it in quotes, in a shell "),
        ("int | None", "many", 'is "many", expected int | null'),
        ("int | str", [1], "is [1], expected int | str"),
        ("Literal['slow', 'fast']", "fats", "expected slow or fast: did you mean fast?"),
        ("Literal[1, 2]", True, "is true, expected 1 or 2"),
        ("Alias", "quick", "expected slow or fast"),
        ("Rate", 0, "=0, but it must be > 0"),
        ("Rate | None", 1.5, "=1.5, but it must be <= 1"),
        ("list[int]", [1, "a"], 'x.1 is "a", expected int'),
        ("list[int]", 1, "is 1, expected list"),
        ("tuple[int, str]", [1], "is [1], expected list of length 2"),
        ("dict[str, float]", {"exact": "x"}, 'x.exact is "x", expected float'),
        ("Mapping[str, float]", [1], "is [1], expected mapping"),
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
