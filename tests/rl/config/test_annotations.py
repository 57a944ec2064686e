"""Values out of YAML are fitted to annotations, nested nodes included."""

from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest

from rl.config.build import build
from rl.config.check import check
from rl.config.schema import ConfigError


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
        ("str", 3, "put it in quotes, in a shell =\"'3'\""),
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
