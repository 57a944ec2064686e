"""A whole environment from YAML: shared objects, tools, toolsets, bindings, rewards, errors."""

import asyncio
import importlib
import json
import sys
from copy import deepcopy
from itertools import islice
from random import Random

import pytest
import yaml

from envs.composed import Composed
from envs.episode import Episode
from envs.messages import assistant, tool_call
from rl.config.build import build
from rl.config.signatures import options_of, parse_module

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

def search(query: str, index: Index, limit: int = 3, *, prefix: str) -> str:
    """Search the index.

    Args:
        query: words.
    """
    if query not in index:
        raise ToolError(f"nothing on {query}")
    return prefix + index[query][:limit * 10]

async def in_index(episode, index, *, bonus: float) -> float:
    return float(episode.text in index.values()) * bonus

def calls(episode, cost: int = 2) -> float:
    return episode.tool_calls - cost * episode.tool_errors

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

async def lookup(episode, word: str, index, notes) -> str:
    """Look up."""
    notes.lines.append(word)
    return f"{word} in {index[0]}, note {len(notes.lines)}, turn {episode.turns}"

def noted(episode, notes, begun) -> float:
    return len(notes.lines) + begun["id"] / 10

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
per_episode:
  begun: {{_target_: parts_mine.started}}
bindings: {{}}
toolsets:
  words:
    _target_: envs.composed.Toolset
    tools: [{{_target_: parts_mine.lookup}}]
    shared: {{dictionary: {{_target_: parts_mine.load_list, title: words}}}}
    per_episode: {{notes: {{_target_: parts_mine.Notes, first: "-"}}}}
    bindings: {{lookup.index: dictionary}}
tools:
  - {{_target_: parts_mine.search, prefix: "it is "}}
rewards:
  exact: {{_target_: envs.rewards.exact_match}}
  found: {{_target_: parts_mine.in_index, bonus: 0.5}}
  calls: {{_target_: parts_mine.calls}}
  noted: {{fn: {{_target_: parts_mine.noted}}, weight: 0.25}}
reward_weights: {{exact: 1.0, found: 0.5}}
max_turns: 4
tool_timeout: 5.0
describe_tools: true
max_concurrent: 7
"""
# What is left without toolsets and rewards.
ALONE = {"toolsets": {}, "per_episode": {}, "reward_weights": {}}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The configuration, which names functions in a module of the user."""
    (tmp_path / "parts_mine.py").write_text(MODULE)
    rows = [{"question": f"Capital {i}?", "answer": ["Paris", "Lutetia"]} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(tmp_path))
    options_of.cache_clear()
    parse_module.cache_clear()
    importlib.invalidate_caches()
    yield yaml.safe_load(CONFIG.format(path=tmp_path / "data.jsonl"))
    sys.modules.pop("parts_mine", None)


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


def answers(episode):
    return [m["content"] for m in episode.messages if m["role"] == "tool"]


def test_the_policy_sees_only_its_own_parameters_of_a_tool_and_gives_no_others(config):
    specs = made(config).tool_specs
    assert [spec["name"] for spec in specs] == ["search", "lookup"]
    assert list(specs[1]["parameters"]["properties"]) == ["word"]
    query = {"type": "string", "description": "words."}
    limit = {"type": "integer", "default": 3}
    assert specs[0]["parameters"]["properties"] == {"query": query, "limit": limit}
    assert made(config, describe_tools=False).tool_specs is None
    forged = tool_call("search", query="broken", prefix="x")
    episode, rewards = play(made(config), forged, tool_call("search", query="it"))
    usage = "Usage: search(query: str, limit: int = 3)"
    unknown = f"Error: Object contains unknown field `prefix`. {usage}"
    assert answers(episode) == [unknown, "Error: nothing on it"]
    assert rewards["calls"] == 2 - 2 * 2


def test_an_episode_with_right_calls_is_answered_and_scored(config):
    env = made(config)
    assert (env.name, env.max_turns, env.max_concurrent, env.tool_timeout) == ("capitals", 4, 7, 5)
    search = tool_call("search", query="capital of france", limit=1)
    calls = (search, tool_call("lookup", word="oui"))
    episode, rewards = play(env, *calls, assistant("Paris"))
    assert answers(episode) == ["it is Paris", "oui in words, note 2, turn 2"]
    assert env.add_system_prompt(episode.messages)[0] == {"role": "system", "content": "Search."}
    assert rewards == {"exact": 1.0, "found": 0.5, "calls": 2.0, "noted": 2.0}
    assert env.reward_weights == {"exact": 1.0, "found": 0.5, "noted": 0.25}


def test_shared_objects_are_made_once_and_others_for_each_episode_and_closed(config):
    env = made(config)
    parts_mine = importlib.import_module("parts_mine")
    assert parts_mine.made == []
    env.examples("eval")  # no episode waits for the objects
    assert parts_mine.made == ["somewhere", "words"]
    for _ in range(2):
        episode, _ = play(env, tool_call("lookup", word="a"), tool_call("lookup", word="b"))
        env.close(episode)
        assert answers(episode)[1] == "b in words, note 3, turn 2"
    assert parts_mine.made == ["somewhere", "words"]
    assert parts_mine.closed == [["-", "a", "b"]] * 2


def test_without_tools_the_answers_are_the_demonstrations(config):
    bare = {**ALONE, "shared": {}, "tools": [], "max_turns": 1}
    bare["rewards"] = {"exact": config["rewards"]["exact"]}
    env = made(config, **bare)
    held_out = env.examples("eval")[0].messages[-1]["content"]
    shown = list(islice(env.demonstrations(Random(0)), 50))
    trained = {f"Capital {i}?" for i in range(4)} - {held_out}
    assert {messages[0]["content"] for messages in shown} == trained
    assert shown[0][1] == assistant("Paris")
    with pytest.raises(ValueError, match="'capitals' has no scripted expert"):
        next(made(config).demonstrations(Random(0)))
    with pytest.raises(ValueError, match="row 1 has no value in the column 'reply'"):
        made(config, dataset={**config["dataset"], "answer": "reply"}).check_machine()


def reward(name: str, **options) -> dict:
    return {"_target_": f"parts_mine.{name}", **options}


MORE = {"more": reward("needs_more"), "noted": reward("noted")}


def test_components_that_do_not_fit_are_refused_with_a_remedy(config):
    for changes, message in (
        ({"reward_weights": {"exakt": 1.0}}, "exakt.* not in rewards: choose from exact, found"),
        ({"max_turns": 1}, "max_turns=1 does not suit 2 tools"),
        ({"shared": {"index": 1, "indx": 3}}, r"no tool and no reward uses \['indx'\] of"),
        ({"rewards": MORE}, "rewards.more has the parameter 'other', which is neither `episode` n"),
        ({"tools": [reward("Notes", first="-")]}, "tools: Notes is a class: list a"),
        ({"tools": [reward("untyped")]}, "untyped has a parameter 'x' without"),
        ({"bindings": {"lost.index": "index"}}, "lost.index is not .* choose from search.query, "),
        ({"bindings": {"noted.notes": "pads"}}, "noted.notes=pads, but .* index, dictiona"),
        ({"bindings": {"lookup.index": "index"}}, "env and toolsets.words .* 'lookup.index': ren"),
        ({"rewards": {"one": {"fn": reward("calls"), "weight": "much"}}}, "one.weight=much: set"),
        ({"reward_weights": {"noted": 1.0}}, "reward_weights.noted and .* both set: remove one"),
    ):
        if "rewards" in changes:
            changes = {"reward_weights": {}, **changes}
        with pytest.raises(ValueError, match=message):
            made(config, **changes)
