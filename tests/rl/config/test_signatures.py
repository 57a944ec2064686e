"""What a target takes is read from its source."""

import inspect
import re
import sys
from importlib import import_module

import pytest

from rl.config.signatures import definition_of, did_you_mean, options_of
from tests.support.composing import CONF

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
class Child(Renamed): ...
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
        ("no_module.f", "no module no_module: run from the folder that holds no_module.py, or put"),
        ("knobs_base.Speed", "no function or class 'Speed'"),
    ],
)
def test_a_target_that_is_not_there_is_named(target, said):
    with pytest.raises(LookupError) as caught:
        options_of(target)
    assert said in str(caught.value)


TEXTS = "\n".join(path.read_text() for path in CONF.rglob("*.yaml"))
TARGETS = sorted(set(re.findall(r"^\s*_target_:.*?(\S+)$", TEXTS, re.MULTILINE)))


@pytest.mark.parametrize("target", [t for t in TARGETS if not t.startswith("lab.cli.launch")])
def test_reading_a_shipped_target_finds_what_importing_it_finds(target):
    module, _, name = target.rpartition(".")
    imported = getattr(import_module(module), name)
    required, configured = {}, {}
    for key, option in options_of(target).items():
        (configured if option.configured else required)[key] = option.required
    assert required == {
        key: parameter.default is inspect.Parameter.empty
        for key, parameter in inspect.signature(imported).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for key, is_required in configured.items():
        parameter = inspect.signature(imported.configure).parameters[key]
        assert is_required is (parameter.default is inspect.Parameter.empty)


def test_a_folder_that_another_package_hides_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "mine.py").write_text("def mine(tokens): ...")
    with pytest.raises(LookupError, match="another package losses instead of the folder losses in"):
        definition_of("losses.mine.mine")


def test_a_similar_word_is_suggested():
    known = ["gspo", "grpo", "rloo", "cispo", "reinforce", "ppo"]
    hints = {"gprg": "grpo", "gpro": "grpo", "cispoo": "cispo", "reinforse": "reinforce"}
    for word, hint in hints.items():
        assert did_you_mean(word, known) == f": did you mean {hint}?"
        assert did_you_mean(word, []) == ""
    assert did_you_mean("foo", known) == did_you_mean("xyz", known) == ""
