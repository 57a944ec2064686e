"""An order or a buffer of one's own is looked at before anything starts."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rl.config.build import construct
from rl.config.schema import ConfigError

PARTS = """
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.example_order import ExampleOrder


class Alone:
    def begin(self, pools, seed): ...
    def next(self, index): ...


class Whole(ExampleOrder):
    def next(self, index):
        return 0, 0


class Kept:
    def add(self, group): ...
    def draw(self, step, count, max_staleness, running): ...


class Filtering(FifoBuffer):
    pass
"""
FORGETFUL = """
from rl.rollouts.example_order import ExampleOrder


class Forgetful(ExampleOrder):
    def observe(self, place, group): ...
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("own_parts", PARTS), ("own_forgetful", FORGETFUL)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("group", "target", "sentence"),
    [
        (
            "order",
            "own_parts.Alone",
            "order: own_parts.Alone has no example() and no observe() and no state() and no load() "
            "and no metrics(): derive it from rl.rollouts.example_order.ExampleOrder",
        ),
        (
            "buffer",
            "own_parts.Kept",
            "buffer: own_parts.Kept has no state() and no load(): derive it from "
            "rl.rollouts.buffer.FifoBuffer",
        ),
        (
            "order",
            "own_forgetful.Forgetful",
            "order: Forgetful observes groups and a resumed run would know nothing of them: give "
            "it state() and load(), too",
        ),
    ],
)
def test_what_a_resume_needs_is_asked_for_in_one_sentence(group, target, sentence, modules):
    with pytest.raises(ConfigError) as caught:
        construct(SimpleNamespace(**{group: {"_target_": target}}), [group])
    assert caught.value.problems == [sentence]


@pytest.mark.parametrize(("group", "name"), [("order", "Whole"), ("buffer", "Filtering")])
def test_a_part_that_derives_from_ours_has_it_all(group, name, modules):
    construct(SimpleNamespace(**{group: {"_target_": f"own_parts.{name}"}}), [group])
    assert isinstance(sys.modules["own_parts"], ModuleType)
