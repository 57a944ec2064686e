"""Whose timeout it was."""

import asyncio

import pytest

from envs.episode import Episode, Example
from envs.tools import Toolbox


def ask(tool, timeout):
    episode = Episode(Example(0, "e", []), [])
    call = {"id": "c", "function": {"name": tool.__name__, "arguments": {}}}
    return asyncio.run(Toolbox([tool], timeout).answer(call, episode)), episode


async def searching() -> str:
    """Wait for a server that does not answer."""
    raise TimeoutError("the index is down")


async def dawdling() -> str:
    """Take too long."""
    await asyncio.sleep(60)


def test_a_tool_s_own_timeout_is_a_fault_of_the_environment():
    with pytest.raises(TimeoutError, match="the index is down"):
        ask(searching, 60.0)


def test_a_call_that_takes_too_long_is_told_to_the_policy():
    answer, episode = ask(dawdling, 0.01)
    assert answer["content"] == "Error: dawdling took longer than 0.01 s"
    assert episode.tool_errors == 1
