"""The chat endpoint whose model is the policy, asked over HTTP."""

import json

import aiohttp
import pytest

from envs.messages import tool_call
from envs.policy_endpoint import SESSION, PolicyEndpoint
from envs.protocol import ContextFull, PolicyTurn

CALL = tool_call("add", a=1)


async def ask(body, *, session="one", message=CALL, cut_off=False):
    """Return status, answer, and the arguments of `speak`."""
    heard = []

    async def speak(messages, tools):
        heard.append((messages, tools))
        if isinstance(message, Exception):
            raise message
        return PolicyTurn(message, cut_off, 3, 4)

    endpoint = PolicyEndpoint({"one": speak})
    async with endpoint.serving() as url, aiohttp.ClientSession() as http:
        headers = {SESSION: session}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.text(), heard


TEXT = {"type": "text"}
BODY = {
    "model": "m",
    "n": 1,
    "messages": [
        {"role": "system", "content": [TEXT | {"text": "be"}, TEXT | {"text": "!"}]},
        {"role": "user", "content": "hi"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
}  # fmt: skip


async def test_a_turn_comes_back_with_its_calls_as_json_text():
    status, text, heard = await ask(BODY)
    assert status == 200
    answer = json.loads(text)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    ((messages, tools),) = heard
    assert [m["content"] for m in messages] == ["be!", "hi"]
    assert tools == [{"name": "add", "parameters": {}}]


async def test_a_streamed_turn_is_the_same_in_two_chunks():
    broken = {"id": "x", "type": "function", "function": {"name": "", "arguments": "{a"}}
    message = {"role": "assistant", "content": "", "tool_calls": [broken | {"error": "no JSON"}]}
    _, text, ((_, tools),) = await ask(
        BODY | {"stream": True, "tools": []}, message=message, cut_off=True
    )
    first, second, done, rest = text.split("\n\n")
    said, ended = (json.loads(line.removeprefix("data: ")) for line in (first, second))
    assert (done, rest, tools) == ("data: [DONE]", "", None)
    # A call that cannot be parsed keeps the policy's text.
    assert said["choices"][0]["delta"]["tool_calls"] == [broken | {"index": 0}]
    assert ended["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert said["id"] == ended["id"]


@pytest.mark.parametrize(
    ("change", "session", "message", "status", "said"),
    [
        ({}, "other", CALL, 401, "this episode has ended"),
        ({}, "one", ContextFull("full"), 400, "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "one",
            CALL,
            400,
            "the policy reads only text, not ['image_url']",
        ),
        ({"messages": "hi"}, "one", CALL, 400, "invalid_request"),
    ],
)
async def test_invalid_requests_are_refused(change, session, message, status, said):
    found, text, _ = await ask(BODY | change, session=session, message=message)
    assert found == status
    assert said in text
