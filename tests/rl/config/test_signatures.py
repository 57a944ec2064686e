"""What a target takes is read from its source."""

import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rl.config.signatures import definition_of, did_you_mean, options_of

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
from knobs_base import Derived as Renamed, Speed, Written, call

class Child(Renamed):
    pass

class Written(Written): ...

def use(*, speed: Speed): ...
"""


@pytest.fixture(autouse=True)
def _written(modules):
    (modules / "knobs_base.py").write_text(BASE)
    (modules / "knobs_importing.py").write_text(IMPORTING)


@pytest.mark.parametrize(
    ("target", "required", "optional"),
    [
        ("knobs_base.Base", ["steps"], ["rate"]),
        ("knobs_base.Derived", ["rate", "steps"], ["names"]),
        ("knobs_base.Written", ["size"], ["speed"]),
        ("knobs_base.Mixed", ["size"], ["speed"]),
        ("knobs_base.HalfPositional", ["steps"], []),
        ("knobs_base.call", ["low"], ["high"]),
        ("knobs_importing.Child", ["rate", "steps"], ["names"]),
        ("knobs_importing.Written", ["size"], ["speed"]),
        ("knobs_importing.call", ["low"], ["high"]),
    ],
)
def test_options_are_read_without_importing_the_module(target, required, optional):
    options = options_of(target)
    assert sorted(key for key, option in options.items() if option.required) == required
    assert sorted(key for key, option in options.items() if not option.required) == optional
    assert "knobs_base" not in sys.modules


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("cispo", "'cispo' has no module: write package.module.name"),
        ("losses.cipso.cispo", "there is no module losses.cipso: did you mean losses.cispo?"),
        ("losses.cispo.cipso", "has no function or class 'cipso': did you mean cispo?"),
        (
            "nowhere_at_all.f",
            "there is no module nowhere_at_all: run from the folder that holds nowhere_at_all.py, "
            "or put that folder into PYTHONPATH",
        ),
        ("knobs_base.Speed", "no function or class 'Speed'"),
    ],
)
def test_a_target_that_is_not_there_is_named(target, said):
    with pytest.raises(LookupError) as caught:
        options_of(target)
    assert said in str(caught.value)


def shipped_targets() -> list[str]:
    conf = Path(__file__).parents[3] / "conf"
    lines = [line for path in conf.rglob("*.yaml") for line in path.read_text().splitlines()]
    found = {line.split()[-1] for line in lines if line.strip().startswith("_target_:")}
    return sorted(target for target in found if not target.startswith("lab.cli.launch"))


@pytest.mark.parametrize("target", shipped_targets())
def test_reading_a_shipped_target_finds_what_importing_it_finds(target):
    module, _, name = target.rpartition(".")
    imported = getattr(import_module(module), name)
    found = options_of(target)
    own = {key: option.required for key, option in found.items() if not option.configured}
    assert own == {
        key: parameter.default is inspect.Parameter.empty
        for key, parameter in inspect.signature(imported).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if configured := found.keys() - own.keys():
        assert configured <= inspect.signature(imported.configure).parameters.keys()
        accepted = inspect.signature(imported.configure).parameters
        assert all(
            found[key].required is (accepted[key].default is inspect.Parameter.empty)
            for key in configured
        )


def test_a_folder_that_another_package_hides_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "mine.py").write_text("def mine(tokens): ...")
    with pytest.raises(LookupError, match="another package losses instead of the folder losses in"):
        definition_of("losses.mine.mine")


@pytest.mark.parametrize(
    ("word", "hint"),
    [("gprg", "grpo"), ("gpro", "grpo"), ("cispoo", "cispo"), ("reinforse", "reinforce"),
     ("foo", ""), ("xyz", "")],
)  # fmt: skip
def test_a_similar_word_is_suggested(word, hint):
    known = ["gspo", "grpo", "rloo", "cispo", "reinforce", "ppo"]
    assert did_you_mean(word, known) == (f": did you mean {hint}?" if hint else "")
    assert did_you_mean(word, []) == ""
