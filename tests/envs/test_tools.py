"""Functions as tools: their schema, the answers to right and wrong calls, and their threads."""

import asyncio
import threading
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import pytest

from envs import threads
from envs.episode import Episode, Example
from envs.tools import Tool, Toolbox, ToolError


def look_up(word: str, limit: int = 3, order: Literal["a-z", "z-a"] = "a-z") -> str:
    """Find a word."""
    if word == "nonsense":
        raise ToolError("no such word: try another")
    return f"{word} {limit} {order}"


async def count(episode: Episode, step: int = 1) -> dict[str, int]:
    """Count up."""
    episode.memory["n"] = episode.memory.get("n", 0) + step
    return {"n": episode.memory["n"]}


@dataclass
class Bounds:
    low: int
    high: int = 9


def episode() -> Episode:
    return Episode(Example(0, "e", []), [])


def ask(call, tools=(look_up, count), held=None):
    return asyncio.run(Toolbox(tools, 5.0).answer(call, held or episode()))


def raw(name, arguments, **rest):
    return {"id": "x", "function": {"name": name, "arguments": arguments}, **rest}


def test_a_right_call_is_answered():
    for call, answer in (
        (raw("look_up", {"word": "a", "limit": "5"}), "a 5 a-z"),  # as models often write numbers
        (raw("look_up", '{"word": "a", "order": "z-a"}'), "a 3 z-a"),  # as remote endpoints send
        (raw("count", ""), '{"n": 1}'),
    ):
        assert ask(call) == {"role": "tool", "tool_call_id": "x", "content": answer}


USAGE = "look_up(word: str, limit: int = 3, order: Literal['a-z', 'z-a'] = 'a-z')"


def test_a_mistake_of_the_policy_gets_a_useful_error_message():
    for call, answer in (
        (raw("look_up", {}), f"Object missing required field `word`. Usage: {USAGE}"),
        (raw("look_up", "{"), "the arguments are not JSON: "),
        (raw("look_up", {"word": "nonsense"}), "no such word: try another"),
        (raw("lookup", {}), f"there is no tool 'lookup'. Tools: {USAGE}, count(step: int = 1)"),
        (raw("count", "[" * 65 + "]" * 65), "the arguments are not JSON: the value has over 64"),
        (raw("count", {"step": 10**400}), "the arguments are not JSON: the value con"),
        (raw("", "{bad", error="the call is no JSON"), f"the call is no JSON. Tools: {USAGE}, "),
    ):
        held = episode()
        assert ask(call, held=held)["content"].startswith(f"Error: {answer}")
        assert (held.tool_calls, held.tool_errors) == (1, 1)


def test_a_tool_takes_records_and_returns_more_than_json_has_and_no_lone_surrogates():
    def within(bounds: Bounds) -> dict[str, Fraction]:
        """Divide.

        Exactly.
        """
        return {"ö\ud800": Fraction(bounds.low, bounds.high)}

    assert Tool(within).spec["description"] == "Divide. Exactly."
    parameters = Tool(within).spec["parameters"]
    assert parameters["properties"]["bounds"] == {"$ref": "#/$defs/Bounds"}
    assert [*parameters["$defs"]["Bounds"]["properties"]] == ["low", "high"]
    told = ask(raw("within", {"bounds": {"low": 1}}), [within])
    assert told["content"] == '{"ö\ufffd": "1/9"}'


def test_an_exception_of_a_tool_is_an_error_of_the_environment():
    async def broken() -> str:
        """Break."""
        raise TimeoutError("mine")

    def blocked() -> str:
        """Break."""
        raise TimeoutError("mine")

    for tool in (broken, blocked):
        held = episode()
        with pytest.raises(TimeoutError, match="mine"):
            ask(raw(tool.__name__, {}), [tool], held)
        assert held.tool_errors == 0


def test_a_slow_tool_blocks_no_other_and_the_wait_for_a_thread_does_not_count(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 1)
    release = threading.Event()

    def stuck() -> str:
        """Block."""
        release.wait(30)
        return "released"

    async def both():
        toolbox = Toolbox([stuck, count], 0.2)
        calls = [asyncio.create_task(toolbox.answer(raw("stuck", {}), episode())) for _ in range(2)]
        quick = await toolbox.answer(raw("count", {}), episode())
        assert (quick["content"], calls[0].done()) == ('{"n": 1}', False)
        first = await calls[0]
        await asyncio.sleep(0.3)
        release.set()
        return first["content"], (await calls[1])["content"]

    assert asyncio.run(both()) == ("Error: stuck took longer than 0.2 s", "released")


def test_a_thread_that_hangs_keeps_its_place_until_it_ends(monkeypatch):
    monkeypatch.setattr(threads, "MAX_THREADS", 2)
    release, running, most = threading.Event(), [0], [0]

    def hang() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        release.wait(30)
        running[0] -= 1

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await threads.call(hang)

    async def main() -> str:
        await given_up()
        assert await threads.call(lambda: "alive") == "alive"  # one place is left
        await asyncio.gather(*(given_up() for _ in range(5)))
        with pytest.raises(RuntimeError, match=r"all 2 threads .* the first one in .*hang: a"):
            await threads.call(time.monotonic)
        release.set()
        while running[0]:
            await asyncio.sleep(0.01)
        return await threads.call(lambda: "alive again")

    assert asyncio.run(main()) == "alive again"
    assert most[0] == 2
