"""The messages client against a real HTTP server that misbehaves on demand."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from envs.episode import Example, StopReason
from envs.protocol import Environment
from rl.inference.completion import GenerationError
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.sampling.chat import ChatSetting
from rl.sampling.messages_chat import MessagesClient
from rl.sampling.player import Player
from tests.support.scripted import SAMPLER, ScriptedEnv

SETTING = ChatSetting(
    sampler=SAMPLER,
    max_seq_len=256,
    has_turns=False,
    version=LiveVersion(0),
    router=Router(),
    served_as="",
    model=Path(),
    renderer="auto",
)
HI = Example(id=0, env="scripted", messages=[{"role": "user", "content": "hi"}])


def said(content: str | None, **rest) -> dict:
    message = {"role": "assistant", "content": content, **rest}
    choice = {"message": message, "finish_reason": rest.get("finish_reason", "stop")}
    return {"choices": [choice], "usage": {"completion_tokens": 7}}


class Server:
    """Answers with (status, body, headers) in turn, the last for ever; remembers what was asked."""

    def __init__(self, *answers: tuple) -> None:
        self.answers, self.asked, self.keys = list(answers), [], []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        status, body, *headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not isinstance(body, bytes):
            body = (body if isinstance(body, str) else json.dumps(body)).encode()
        return web.Response(status=status, body=body, headers=headers[0] if headers else {})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


def client(url: str, max_retries: int = 2) -> MessagesClient:
    return MessagesClient(
        url=url, model="them", api_key_variable="THEIR_KEY", max_retries=max_retries
    )


async def play(server: Server, env: Environment, n: int = 1, seed: int | None = None, **changes):
    sampler = replace(SAMPLER, **changes)
    setting = replace(SETTING, sampler=sampler)
    async with server.listening() as url, client(url).connect(setting) as chat:
        return await Player(sampler, env, chat, seed=seed).play_group(0, HI, n)


async def test_an_episode_in_words_is_scored_and_its_tokens_are_counted(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "secret")
    server = Server((200, said("good")))
    first, second = await play(server, ScriptedEnv(), 2)
    assert (first.reward, second.reward) == (2.0, 2.0)
    assert (first.num_completion, first.rows) == (7, ())
    assert server.keys == ["Bearer secret"] * 2
    assert server.asked[0] == {
        "model": "them",
        "messages": HI.messages,
        "max_tokens": 32,
        "temperature": 0.5,  # and no parameter that only vLLM knows
    }


async def test_stop_texts_and_seeds_are_the_servers_affair():
    server = Server((200, said("good")))
    (rollout, _) = await play(server, ScriptedEnv(), 2, seed=5, stop=["</a>"])
    assert rollout.messages[-1]["content"] == "good"  # it has cut the text already
    assert [body["stop"] for body in server.asked] == [["</a>"]] * 2
    assert len({body["seed"] for body in server.asked}) == 2


async def test_several_turns_and_a_tool_whose_arguments_travel_as_text():
    def look(word: str) -> str:
        """Look a word up.

        Args:
            word: which one.
        """
        return f"{word} means good"

    class Tooled(ScriptedEnv):
        tools = (look,)
        reply = Environment.reply

    call = {"id": "c1", "type": "function"}
    call |= {"function": {"name": "look", "arguments": '{"word": "bon"}'}}
    server = Server((200, said(None, tool_calls=[call])), (200, said("good")))
    (rollout,) = await play(server, Tooled(max_turns=3))
    assert (rollout.reward, rollout.turns, rollout.tool_calls) == (2.0, 2, 1)
    assert rollout.num_completion == 14
    assert server.asked[0]["tools"][0]["function"]["name"] == "look"
    again = server.asked[1]["messages"]
    assert again[1]["tool_calls"][0]["function"]["arguments"] == '{"word": "bon"}'
    assert again[2] == {"role": "tool", "tool_call_id": "c1", "content": "bon means good"}


async def test_too_many_requests_are_sent_again_after_the_time_the_server_asks_for():
    server = Server((429, "slow down", {"Retry-After": "0.3"}), (503, "busy"), (200, said("good")))
    began = monotonic()
    (rollout,) = await play(server, ScriptedEnv())
    assert rollout.reward == 2.0
    assert len(server.asked) == 3
    assert monotonic() - began >= 0.3 + 0.5  # then half of our own wait of 1 s at least


async def test_an_answer_that_was_cut_off_and_one_that_found_no_room_are_told_apart():
    cut = {**said("goo")["choices"][0], "finish_reason": "length"}
    (rollout,) = await play(Server((200, {"choices": [cut]})), ScriptedEnv())
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    full = "This model's maximum context length is 16 tokens"
    (rollout,) = await play(Server((400, full)), ScriptedEnv())
    assert rollout.stop_reason is StopReason.CONTEXT


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (
            401,
            "bad key",
            "answered 401: bad key: the server refused the key in THEIR_KEY: set that",
        ),
        (404, "no model", "answered 404: no model: the server knows no model client.model=them"),
        (429, "slow down", "answered 429: slow down, 3 times in a row: lower sampler.max_conc"),
        (500, "oh no", "answered 500: oh no, 3 times in a row"),
        (400, "no tools please", "answered 400: no tools please"),
        (200, "<html>", "did not answer with JSON: '<html>'"),
        (200, {"error": "x"}, 'did not answer as the OpenAI API does: {"error": "x"}'),
    ],
)
async def test_what_cannot_work_is_one_sentence_that_names_the_address(
    status, body, told, monkeypatch
):
    monkeypatch.setenv("THEIR_KEY", "secret")
    server = Server((status, body, {"Retry-After": "0"}))
    with pytest.raises(GenerationError) as caught:
        await play(server, ScriptedEnv())
    assert told in str(caught.value)
    assert str(caught.value).startswith("client.url=http://127.0.0.1:")
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


async def test_a_server_that_is_not_there_is_an_error():
    server = Server((200, said("good")))
    async with server.listening() as url:
        pass
    async with client(url, max_retries=0).connect(SETTING) as chat:
        with pytest.raises(
            GenerationError, match=r"did not answer \(ConnectError.*: is the server running"
        ):
            await asyncio.wait_for(Player(SAMPLER, ScriptedEnv(), chat).play_group(0, HI, 1), 20)


BOMB = gzip.compress(bytes(10**7))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((200, BOMB, {"Content-Encoding": "gzip"}), "compresses its answers"),
        ((200, b" " * (33 << 20)), "answers with more than 32 MiB"),
        ((307, "", {"Location": "http://127.0.0.1:9/"}), "answered 307: "),
        ((200, "[" * 5000), "did not answer with JSON: '[[["),
        ((200, b"\xff\xfe"), "did not answer with JSON: "),
        ((200, {"choices": [{"message": {"content": ["a"]}}]}), "did not answer as the OpenAI"),
        ((200, {"choices": [{"message": "hi"}]}), "did not answer as the OpenAI API does"),
        ((200, {"choices": [said("x")["choices"][0]], "usage": 7}), "did not answer as the Open"),
        ((200, []), "did not answer as the OpenAI API does: []"),
        ((500, "\x1b[2Jboo"), "answered 500: [2Jboo"),
    ],
    ids=[
        *("bomb", "endless", "redirect", "deep", "no UTF-8", "parts", "no message", "usage"),
        *("list", "escape"),
    ],
)
async def test_a_server_that_means_harm_is_one_sentence(answer, told):
    status, body, *headers = answer
    server = Server((status, body, {"Retry-After": "0", **(headers[0] if headers else {})}))
    with pytest.raises(GenerationError) as caught:
        await play(server, ScriptedEnv())
    assert told in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("retry_after", ["nan", "-inf", "soon"])
async def test_a_retry_after_that_is_no_time_is_not_waited_for(retry_after):
    server = Server((429, "slow down", {"Retry-After": retry_after}), (200, said("good")))
    async with asyncio.timeout(10):
        (rollout,) = await play(server, ScriptedEnv())
    assert rollout.reward == 2.0


@pytest.mark.parametrize(
    "call",
    [
        *(7, None, "look", [], {}, {"function": None}, {"function": {"name": ["look"]}}),
        {"id": 3, "function": {"name": "look", "arguments": "[" * 5000}},
        {"function": {"name": "look", "arguments": {"word": ["deep"]}}},
    ],
)
async def test_a_malformed_tool_call_of_a_server_is_the_policys_mistake(call):
    async def look(word: str) -> str:
        """Look a word up."""
        return word

    class Tooled(ScriptedEnv):
        tools = (look,)
        reply = Environment.reply

    server = Server((200, said("\ud800", tool_calls=[call])), (200, said("good")))
    (rollout,) = await play(server, Tooled(max_turns=3))
    assert (rollout.reward, rollout.tool_calls, rollout.tool_errors) == (2.0, 1, 1)
    assert rollout.messages[1]["content"] == "\ufffd"


def test_an_address_without_a_scheme_is_refused_at_once():
    with pytest.raises(ValueError, match=r"client\.url=host:8000 is not an address: write http"):
        client("host:8000")
