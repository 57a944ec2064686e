"""A whole environment from YAML: a module of the user's, shared objects, tools, rewards, errors."""

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

from envs.composed import Composed
from envs.episode import Episode
from envs.messages import assistant, tool_call
from rl.config.build import build
from rl.config.schema import ConfigError
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


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The configuration, whose parts lie in a module of the user's."""
    (tmp_path / "parts_mine.py").write_text(MODULE)
    rows = [{"question": f"Capital {i}?", "answer": "Paris"} for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.syspath_prepend(str(tmp_path))
    read.cache_clear()
    source.cache_clear()
    invalidate_caches()
    yield yaml.safe_load(CONFIG.format(path=tmp_path / "data.jsonl"))
    sys.modules.pop("parts_mine", None)


def made(config, **changes) -> Composed:
    return build({**deepcopy(config), **changes})()


def play(env: Composed, *messages) -> tuple[Episode, dict[str, float]]:
    """What comes of an episode in which the policy says these messages."""

    async def converse():
        example = env.examples("train")[0]
        episode = Episode(example, list(example.messages))
        for message in messages:
            episode.messages.append(message)
            episode.turns += 1
            episode.messages += await env.reply(episode, message) or []
        return episode, await env.score(episode)

    return asyncio.run(converse())


def test_the_policy_sees_of_a_tool_what_it_may_say(config):
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


def test_wrong_calls_get_an_answer_that_the_policy_can_use(config):
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


def test_what_is_shared_is_made_once_and_not_before_the_examples_are_asked_for(config):
    env = made(config)
    parts_mine = importlib.import_module("parts_mine")
    assert parts_mine.made == []
    env.examples("train")
    play(env, tool_call("count"), tool_call("count"))
    assert parts_mine.made == ["somewhere"]


def test_a_part_that_fails_is_named_with_its_own_line(config):
    line = MODULE.splitlines().index('    return {}["no such key"]') + 1
    broken = {"rewards": {"mine": {"_target_": "parts_mine.broken"}}, "reward_weights": {}}
    with pytest.raises(RuntimeError) as caught:
        play(made(config, **broken, shared={}, tools=[], max_turns=1), assistant("x"))
    problem = f"the reward mine: KeyError: 'no such key' (parts_mine.py:{line})"
    assert str(caught.value) == problem
    with pytest.raises(RuntimeError, match=r"the tool search: TypeError: .* \(parts_mine.py:\d+\)"):
        play(made(config), tool_call("search", query="broken"))


def test_without_tools_the_answers_are_demonstrations(config):
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
def test_parts_that_do_not_fit_are_refused_with_a_remedy(config, changes, message):
    if "rewards" in changes:
        changes = {"reward_weights": {}, **changes}
    with pytest.raises(ValueError, match=message):
        made(config, **changes)


def problem(config, **changes) -> str:
    with pytest.raises((ConfigError, LookupError)) as caught:
        made(config, **changes)
    return caught.value.args[0]


def test_a_mistaken_part_is_refused_by_name(config):
    assert "index.pth is not a knob" in problem(
        config, shared={"index": {"_target_": "parts_mine.load_index", "pth": "x"}}
    ).replace("load_index.", "index.")
    assert problem(config, tools=[{"_target_": "parts_mine.serch"}]) == (
        "parts_mine has no function or class 'serch': did you mean search?"
    )
    assert problem(config, rewards={"mine": {"_target_": "no_such.thing"}}).startswith(
        "there is no module no_such: start in the folder that holds no_such.py"
    )
    assert "tools has an item 0 that is 3 where a node with _target_" in problem(config, tools=[3])
