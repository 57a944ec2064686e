"""A whole environment from YAML: shared objects, tools, toolsets, bindings, rewards, errors."""

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib import invalidate_caches
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import yaml

from envs.binding import Objects
from envs.composed import Composed
from envs.episode import Episode, Example
from envs.messages import assistant, tool_call
from rl.config.build import build
from rl.config.signatures import read, source

MODULE = '''
from __future__ import annotations
from typing import TYPE_CHECKING

from envs.tools import ToolError

if TYPE_CHECKING:
    from elsewhere import Index  # the schema must not need it

made = []

def load_index(*, path: str) -> dict:
    made.append(path)
    return {"capital of france": "Paris", "broken": None}

class Counter:
    def __init__(self, *, start: int) -> None:
        self.n = start

def search(query: str, index: Index, limit: int = 3, *, prefix: str) -> str:
    """Search the index.

    Args:
        query: words.
    """
    if query not in index:
        raise ToolError(f"nothing on {query}")
    return prefix + index[query][:limit * 10]

async def count(episode, counter: Counter, step: int = 1) -> int:
    """Count."""
    counter.n += step
    episode.memory["counted"] = counter.n
    return counter.n

async def in_index(episode, index, *, bonus: float) -> float:
    return float(episode.text in index.values()) * bonus

def calls(episode) -> float:
    return episode.tool_calls - 2 * episode.tool_errors

class Near:
    def __init__(self, *, wanted: int) -> None:
        self.wanted = wanted

    async def __call__(self, episode, counter) -> float:
        return float(counter.n == self.wanted)

def broken(episode) -> float:
    return {}["no such key"]

def needs_more(episode, other) -> float:
    return 0.0

closed = []

def load_list(*, title: str) -> list:
    made.append(title)
    return [title]

class Notes:
    def __init__(self, *, first: str) -> None:
        self.lines = [first]

    def close(self) -> None:
        closed.append(self.lines)

def started(episode) -> dict:
    return {"id": episode.example.id}

def find(query: str, index) -> str:
    """Find."""
    return f"{query} in {index[0]}"

def lookup(word: str, index, notes) -> str:
    """Look up."""
    notes.lines.append(word)
    return f"{word} in {index[0]}, note {len(notes.lines)}"

def noted(episode, notes, begun) -> float:
    return len(notes.lines) + begun["id"] / 10

def one() -> float:
    return 1.0

def untyped(x) -> str:
    """X."""
'''

CONFIG = """
_target_: envs.composed.Composed
name: capitals
dataset:
  _target_: envs.datasets.JsonLines
  path: {path}
  eval_path: null
  prompt: question
  answer: answer
  num_eval: 1
system_prompt: Search.
shared:
  index: {{_target_: parts_mine.load_index, path: somewhere}}
  counter: {{_target_: parts_mine.Counter, start: 5}}
per_episode: {{}}
bindings: {{}}
toolsets: {{}}
tools:
  - {{_target_: parts_mine.search, prefix: "it is "}}
  - {{_target_: parts_mine.count}}
rewards:
  exact: {{_target_: envs.rewards.exact_match}}
  found: {{_target_: parts_mine.in_index, bonus: 0.5}}
  calls: {{_target_: parts_mine.calls}}
  near: {{_target_: parts_mine.Near, wanted: 6}}
reward_weights: {{exact: 1.0, found: 0.5}}
max_turns: 4
tool_timeout: 5.0
describe_tools: true
max_concurrent: 7
"""


TWO_SETS = """
_target_: envs.composed.Composed
name: two-sets
dataset:
  {_target_: envs.datasets.JsonLines, path: x, eval_path: null, prompt: q, answer: a, num_eval: 0}
shared: {}
per_episode:
  begun: {_target_: parts_mine.started}
bindings: {}
tools: []
toolsets:
  web:
    _target_: envs.composed.Toolset
    tools: [{_target_: parts_mine.find}]
    shared: {pages: {_target_: parts_mine.load_list, title: web}}
    bindings: {find.index: pages}
  words:
    _target_: envs.composed.Toolset
    tools: [{_target_: parts_mine.lookup}]
    shared: {dictionary: {_target_: parts_mine.load_list, title: words}}
    per_episode: {notes: {_target_: parts_mine.Notes, first: "-"}}
    bindings: {lookup.index: dictionary}
rewards:
  noted: {fn: {_target_: parts_mine.noted}, weight: 0.5}
  one: {_target_: parts_mine.one}
reward_weights: {one: 2.0}
max_turns: 4
tool_timeout: 5.0
describe_tools: true
max_concurrent: null
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The configuration, which names functions in a module of the user."""
    (tmp_path / "parts_mine.py").write_text(MODULE)
    rows = [{"question": f"Capital {i}?", "answer": "Paris"} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(tmp_path))
    read.cache_clear()
    source.cache_clear()
    invalidate_caches()
    yield yaml.safe_load(CONFIG.format(path=tmp_path / "data.jsonl"))
    sys.modules.pop("parts_mine", None)


@pytest.fixture
def two_sets(config: dict) -> dict:
    return yaml.safe_load(TWO_SETS)


def made(config, **changes) -> Composed:
    return build({**deepcopy(config), **changes})()


def play(env: Composed, *messages) -> tuple[Episode, dict[str, float]]:
    """Return the episode in which the policy says these messages, and its rewards."""

    async def converse():
        example = env.examples("train")[0]
        episode = Episode(example, list(example.messages))
        for message in messages:
            episode.messages.append(message)
            episode.turns += 1
            episode.messages += await env.reply(episode, message) or []
        return episode, await env.score(episode)

    return asyncio.run(converse())


def test_the_policy_sees_only_its_own_parameters_of_a_tool(config):
    specs = made(config).tool_specs
    assert [spec["name"] for spec in specs] == ["search", "count"]
    assert specs[0] == {
        "name": "search",
        "description": "Search the index.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "words."},
                "limit": {"type": "integer", "default": 3},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }
    assert made(config, describe_tools=False).tool_specs is None


def test_an_episode_with_right_calls_is_answered_and_scored(config):
    env = made(config)
    assert (env.name, env.max_turns, env.max_concurrent) == ("capitals", 4, 7)
    episode, rewards = play(
        env,
        tool_call("search", query="capital of france", limit=1),
        tool_call("count"),
        assistant("Paris"),
    )
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["it is Paris", "6"]
    assert env.opened(episode.messages)[0] == {"role": "system", "content": "Search."}
    assert episode.memory == {"counted": 6}
    assert rewards == {"exact": 1.0, "found": 0.5, "calls": 2.0, "near": 1.0}
    assert env.reward_weights == {"exact": 1.0, "found": 0.5}


def test_wrong_calls_get_a_useful_error_message(config):
    episode, rewards = play(
        made(config),
        tool_call("search", query="nothing"),
        tool_call("search", query="broken", index={}),
        tool_call("search", query="broken", prefix="I say "),
        assistant("London"),
    )
    answers = [m["content"] for m in episode.messages if m["role"] == "tool"]
    usage = "Usage: search(query: string, limit?: integer)"
    assert answers == [
        "Error: nothing on nothing",
        f"Error: Object contains unknown field `index`. {usage}",
        f"Error: Object contains unknown field `prefix`. {usage}",
    ]
    assert rewards == {"exact": 0.0, "found": 0.0, "calls": 3 - 2 * 3, "near": 0.0}


def test_shared_objects_are_made_once_at_the_first_call_of_examples(config):
    env = made(config)
    parts_mine = importlib.import_module("parts_mine")
    assert parts_mine.made == []
    env.examples("train")
    play(env, tool_call("count"), tool_call("count"))
    assert parts_mine.made == ["somewhere"]


def test_an_error_names_the_tool_or_reward_and_its_line(config):
    line = MODULE.splitlines().index('    return {}["no such key"]') + 1
    broken = {"rewards": {"mine": {"_target_": "parts_mine.broken"}}, "reward_weights": {}}
    with pytest.raises(RuntimeError) as caught:
        play(made(config, **broken, shared={}, tools=[], max_turns=1), assistant("x"))
    problem = f"the reward mine: KeyError: 'no such key' (parts_mine.py:{line})"
    assert str(caught.value) == problem
    with pytest.raises(RuntimeError, match=r"the tool search: TypeError: .* \(parts_mine.py:\d+\)"):
        play(made(config), tool_call("search", query="broken"))


def test_without_tools_the_answers_are_the_demonstrations(config):
    alone = {"shared": {}, "tools": [], "max_turns": 1, "reward_weights": {"exact": 1.0}}
    alone["rewards"] = {"exact": config["rewards"]["exact"]}
    env = made(config, **alone)
    held_out = env.examples("eval")[0].messages[-1]["content"]
    shown = list(islice(env.demonstrations(Random(0)), 50))
    assert {messages[0]["content"] for messages in shown} == {f"Capital {i}?" for i in range(4)} - {
        held_out
    }
    assert shown[0][1] == {"role": "assistant", "content": "Paris"}
    with pytest.raises(ValueError, match="'capitals' has no scripted expert"):
        made(config).demonstrations(Random(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": {}}, "rewards is empty"),
        ({"reward_weights": {"exakt": 1.0}}, "exakt.* does not have: use exact or found or"),
        ({"max_turns": 1}, "max_turns=1 with 2 tools"),
        (
            {"tools": [], "shared": {}, "rewards": {"calls": {"_target_": "parts_mine.calls"}}},
            "max_turns=4 with no tools",
        ),
        ({"shared": {"index": 1, "counter": 2, "indx": 3}}, r"shared names \['indx'\], which no"),
        ({"shared": {"index": 1, "counter": 2, "episode": 3}}, r"shared names \['episode'\]"),
        (
            {"rewards": {"more": {"_target_": "parts_mine.needs_more"}}},
            r"rewards.more takes 'other', which is neither the episode nor shared \(index, count",
        ),
        ({"tools": [{"_target_": "parts_mine.untyped"}]}, "untyped has a parameter 'x' without"),
        ({"tools": [{"_target_": "parts_mine.count"}] * 2}, "two tools have the same name"),
        ({"tools": [{"_target_": "parts_mine.Near", "wanted": 1}]}, "tools: Near is a class"),
    ],
)
def test_tools_rewards_and_objects_that_do_not_fit_are_refused_with_a_remedy(
    config, changes, message
):
    if "rewards" in changes:
        changes = {"reward_weights": {}, **changes}
    with pytest.raises(ValueError, match=message):
        made(config, **changes)


def problem(config, **changes) -> str:
    with pytest.raises((ValueError, LookupError)) as caught:
        made(config, **changes)
    return caught.value.args[0]


def test_a_mistake_in_a_node_is_refused_by_name(config):
    assert "index.pth is not an option" in problem(
        config, shared={"index": {"_target_": "parts_mine.load_index", "pth": "x"}}
    ).replace("load_index.", "index.")
    assert problem(config, tools=[{"_target_": "parts_mine.serch"}]) == (
        "parts_mine has no function or class 'serch': did you mean search?"
    )
    assert problem(config, rewards={"mine": {"_target_": "no_such.thing"}}).startswith(
        "there is no module no_such: start in the folder that holds no_such.py"
    )
    assert "tools.0 is 3, expected a node with _target_" in problem(config, tools=[3])


def answers(env: Composed, number: int, *calls) -> tuple[list[str], dict]:
    """Return the tools' answers in episode `number`, and its rewards."""

    async def played():
        episode = Episode(Example(number, env.name, []), [])
        replies = await env.reply(episode, {"role": "assistant", "tool_calls": list(calls)})
        rewards = await env.score(episode)
        env.close(episode)
        return [reply["content"] for reply in replies or []], rewards

    return asyncio.run(played())


def call(name: str, **arguments) -> dict:
    return tool_call(name, **arguments)["tool_calls"][0]


def test_each_parameter_gets_the_object_of_its_binding(two_sets):
    env = made(two_sets)
    told, rewards = answers(env, 3, call("find", query="Paris"), call("lookup", word="oui"))
    assert told == ["Paris in web", "oui in words, note 2"]
    assert rewards == {"noted": 2.3, "one": 1.0}
    specs = {spec["name"]: list(spec["parameters"]["properties"]) for spec in env.tool_specs}
    assert specs == {"find": ["query"], "lookup": ["word"]}  # the policy sees no object


def test_each_episode_has_its_own_objects_which_are_closed_at_its_end(two_sets):
    env = made(two_sets)
    for number in (1, 2):
        told, _ = answers(env, number, call("lookup", word="a"), call("lookup", word="b"))
        assert told[-1] == "b in words, note 3"  # a new episode has new notes
    assert sys.modules["parts_mine"].made == ["web", "words"]  # those of the run, once
    assert sys.modules["parts_mine"].closed == [["-", "a", "b"]] * 2


def test_an_object_that_raises_in_close_does_not_keep_others_open():
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


def test_a_reward_may_have_its_weight_beside_it(two_sets):
    assert made(two_sets).reward_weights == {"one": 2.0, "noted": 0.5}


def test_a_toolset_can_be_removed_by_its_name(two_sets):
    del two_sets["toolsets"]["web"]
    assert [spec["name"] for spec in made(two_sets).tool_specs] == ["lookup"]


@pytest.mark.parametrize(
    ("where", "value", "sentence"),
    [
        (
            "bindings",
            {"lost.index": "pages"},
            r"bindings names lost.index, which is no parameter of a tool or a reward: there are "
            r"find.query, find.index, lookup.word",
        ),
        (
            "bindings",
            {"noted.notes": "pads"},
            r"bindings.noted.notes=pads, but there is no such object: shared and per_episode have "
            "pages, dictionary, begun, notes",
        ),
        (
            "bindings",
            {"find.index": "dictionary"},
            r"env and toolsets.web both have a binding of 'find.index'",
        ),
        (
            "shared",
            {"pages": {"_target_": "parts_mine.load_list", "title": "x"}},
            "env and toolsets.web both have an object 'pages': rename one, and say in bindings",
        ),
        (
            "per_episode",
            {"pages": {"_target_": "parts_mine.load_list", "title": "x"}},
            "env and toolsets.web both have an object 'pages'",
        ),
        (
            "rewards",
            {"one": {"fn": {"_target_": "parts_mine.one"}}},
            "rewards.one has fn: give it a _target_, or fn .with a _target_. and weight",
        ),
        ("rewards", {"one": {}}, "rewards.one has nothing: give it a _target_, or fn"),
        (
            "rewards",
            {"one": {"fn": {"_target_": "parts_mine.one"}, "weight": "much"}},
            "rewards.one.weight=much: a number",
        ),
        (
            "rewards",
            {"one": {"fn": {"_target_": "parts_mine.one"}, "weight": 1.0}},
            "reward_weights.one and rewards.one.weight: give it one weight",
        ),
    ],
)
def test_contradicting_settings_are_refused_with_one_sentence(two_sets, where, value, sentence):
    with pytest.raises(ValueError, match=sentence):
        made(two_sets, **{where: value})
