"""Serve a scripted chat endpoint in a thread, for libraries with their own client."""

from collections.abc import Callable
from typing import Any

from envs.messages import Message
from envs.policy_endpoint import completion
from envs.protocol import PolicyTurn
from tests.support.answers import Answers


class ScriptedEndpoint(Answers):
    """Answer every request with the result of `speak`, which a token limit ended if `cut_off`."""

    def __init__(self, speak: Callable[[list[Message]], Message], *, cut_off: bool = False) -> None:
        super().__init__()
        self._speak, self._cut_off = speak, cut_off

    def answer(self, path: str, body: Any, number: int) -> tuple[Any, ...]:
        return 200, completion(PolicyTurn(self._speak(body["messages"]), self._cut_off, 10, 5))


def reverse_half(messages: list[Message]) -> Message:
    """Answer `reverse: ...`, correctly except for words that begin with a to m."""
    word = messages[-1]["content"].removeprefix("reverse: ")
    return {"role": "assistant", "content": word[::-1] if word > "n" else word}


def sort_the_first(messages: list[Message]) -> Message:
    """Answer `sort: ...` correctly in every turn."""
    names = next(m["content"] for m in messages if m["role"] == "user").removeprefix("sort: ")
    return {"role": "assistant", "content": " ".join(sorted(names.split()))}


def use_the_adder(messages: list[Message]) -> Message:
    """Call `add` first, then repeat its answer."""
    if messages[-1]["role"] == "tool":
        return {"role": "assistant", "content": messages[-1]["content"]}
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
