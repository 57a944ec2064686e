"""Toolsets, bindings, objects of a run and of an episode, and rewards with their weight."""

import asyncio
import sys
from copy import deepcopy
from importlib import invalidate_caches
from pathlib import Path

import pytest
import yaml

from envs.composed import Composed
from envs.episode import Episode, Example
from envs.messages import tool_call
from envs.objects import Objects
from rl.config.build import build
from rl.config.signatures import read, source

MODULE = '''
made = []
closed = []

def load(*, title: str) -> list:
    made.append(title)
    return [title]

class Notes:
    def __init__(self, *, first: str) -> None:
        self.lines = [first]

    def close(self) -> None:
        closed.append(self.lines)

class Tab:
    async def close(self) -> None:
        closed.append(self)

def started(episode) -> dict:
    return {"id": episode.example.id}

def search(query: str, index) -> str:
    """Search."""
    return f"{query} in {index[0]}"

def lookup(word: str, index, notes) -> str:
    """Look up."""
    notes.lines.append(word)
    return f"{word} in {index[0]}, note {len(notes.lines)}"

def noted(episode, notes, begun) -> float:
    return len(notes.lines) + begun["id"] / 10

def one() -> float:
    return 1.0
'''

CONFIG = """
_target_: envs.composed.Composed
name: two-sets
dataset:
  {_target_: envs.datasets.JsonLines, path: x, eval_path: null, prompt: q, answer: a, num_eval: 0}
shared: {}
per_episode:
  begun: {_target_: parts_sets.started}
bindings: {}
tools: []
toolsets:
  web:
    _target_: envs.toolset.Toolset
    tools: [{_target_: parts_sets.search}]
    shared: {pages: {_target_: parts_sets.load, title: web}}
    bindings: {search.index: pages}
  words:
    _target_: envs.toolset.Toolset
    tools: [{_target_: parts_sets.lookup}]
    shared: {dictionary: {_target_: parts_sets.load, title: words}}
    per_episode: {notes: {_target_: parts_sets.Notes, first: "-"}}
    bindings: {lookup.index: dictionary}
rewards:
  noted: {fn: {_target_: parts_sets.noted}, weight: 0.5}
  one: {_target_: parts_sets.one}
reward_weights: {one: 2.0}
max_turns: 4
tool_timeout: 5.0
describe_tools: true
max_concurrent: null
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "parts_sets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    read.cache_clear()
    source.cache_clear()
    invalidate_caches()
    yield yaml.safe_load(CONFIG)
    sys.modules.pop("parts_sets", None)


def made(config, **changes) -> Composed:
    return build({**deepcopy(config), **changes})()


def play(env: Composed, number: int, *calls) -> tuple[list[str], dict]:
    """What the tools answer in episode `number`, and what it is worth."""

    async def played():
        episode = Episode(Example(number, env.name, []), [])
        replies = await env.reply(episode, {"role": "assistant", "tool_calls": list(calls)})
        rewards = await env.score(episode)
        env.close(episode)
        return [reply["content"] for reply in replies or []], rewards

    return asyncio.run(played())


def call(name: str, **arguments) -> dict:
    return tool_call(name, **arguments)["tool_calls"][0]


def test_each_parameter_gets_the_object_that_a_binding_says(config):
    env = made(config)
    answers, rewards = play(env, 3, call("search", query="Paris"), call("lookup", word="oui"))
    assert answers == ["Paris in web", "oui in words, note 2"]
    assert rewards == {"noted": 2.3, "one": 1.0}
    specs = {spec["name"]: list(spec["parameters"]["properties"]) for spec in env.tool_specs}
    assert specs == {"search": ["query"], "lookup": ["word"]}  # the policy sees no object


def test_objects_of_an_episode_are_its_own_and_closed_with_it(config):
    env = made(config)
    for number in (1, 2):
        answers, _ = play(env, number, call("lookup", word="a"), call("lookup", word="b"))
        assert answers[-1] == "b in words, note 3"  # nothing is left of the episode before
    assert sys.modules["parts_sets"].made == ["web", "words"]  # those of the run, once
    assert sys.modules["parts_sets"].closed == [["-", "a", "b"]] * 2


def test_an_object_that_raises_when_it_is_closed_keeps_no_other_open():
    closed = []

    class Broken:
        def close(self):
            raise OSError("gone")

    class Whole:
        def close(self):
            closed.append(self)

    objects = Objects({}, {"one": Whole(), "broken": Broken(), "other": Whole()})
    episode = Episode(Example(0, "x", []), [])
    for name in objects.names:
        asyncio.run(objects.get(name, episode))
    with pytest.raises(OSError, match="gone"):
        objects.close(episode)
    assert len(closed) == 2


def test_a_reward_may_bring_its_weight(config):
    assert made(config).reward_weights == {"one": 2.0, "noted": 0.5}


def test_a_toolset_is_left_out_by_its_name(config):
    del config["toolsets"]["web"]
    assert [spec["name"] for spec in made(config).tool_specs] == ["lookup"]


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        (
            "bindings",
            {"find.index": "pages"},
            r"bindings names find.index, which is no parameter of a tool or a reward: there are "
            r"search.query, search.index, lookup.word",
        ),
        (
            "bindings",
            {"noted.notes": "pads"},
            r"bindings.noted.notes=pads, but there is no such object: shared and per_episode have "
            "pages, dictionary, begun, notes",
        ),
        (
            "bindings",
            {"search.index": "dictionary"},
            r"env and toolsets.web both have a binding of 'search.index'",
        ),
        (
            "shared",
            {"pages": {"_target_": "parts_sets.load", "title": "x"}},
            "env and toolsets.web both have an object 'pages': rename one, and say in bindings",
        ),
        (
            "per_episode",
            {"pages": {"_target_": "parts_sets.load", "title": "x"}},
            "shared and per_episode both name pages: keep one of them",
        ),
        (
            "per_episode",
            {"tab": {"_target_": "parts_sets.Tab"}},
            "per_episode.tab: Tab.close is a coroutine, and nobody waits for it",
        ),
        (
            "rewards",
            {"one": {"fn": {"_target_": "parts_sets.one"}}},
            "rewards.one has fn: give it a _target_, or fn .with a _target_. and weight",
        ),
        ("rewards", {"one": {}}, "rewards.one has nothing: give it a _target_, or fn"),
        (
            "rewards",
            {"one": {"fn": {"_target_": "parts_sets.one"}, "weight": "much"}},
            "rewards.one.weight=much: a number",
        ),
        (
            "rewards",
            {"one": {"fn": {"_target_": "parts_sets.one"}, "weight": 1.0}},
            "reward_weights.one and rewards.one.weight: give it one weight",
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(config, where, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(config, **{where: value})
