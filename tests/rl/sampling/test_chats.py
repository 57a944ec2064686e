"""Each client plays whole conversations over a socket as one row or as forks, with stop texts."""

import asyncio
import json
import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import pytest
from aiohttp import web

from envs.episode import Example, StopReason
from envs.protocol import Environment
from rl.inference.completion import Completion, GenerationError
from rl.model.tokenizer import PlainParser, Tokenizer, load_parser, load_renderer
from rl.records import Rollout
from rl.sampling.messages_chat import MessagesClient
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererClient, tokens_before_stop
from rl.sampling.tokens_chat import TokensClient
from tests.support import served_engine
from tests.support.answers import Answers, completion
from tests.support.replicas import router_to
from tests.support.scripted import (
    IM_END,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    chat_settings,
    tiny_model,
    tiny_tokenizer,
    trained,
)
from tests.support.served_engine import GENERATE

SAID = ("<think>\nfirst\n</think>\n\none", "<think>\nthen\n</think>\n\ntwo", "good")
PLAIN = ("one", "two</a>", "good")  # vLLM ends the second turn at a stop text
EXAMPLE = Example(id=0, env="scripted", messages=[{"role": "user", "content": "hi"}])
# Qwen3's template, too, drops the thinking of an earlier turn before a user message.
DROPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{# <think> #}"
)


class Server:
    """Serve vLLM's two routes on a Unix socket; return `answers` in order and note the prompts."""

    def __init__(self, folder: Path, answers: tuple[str, ...], version: int = 7) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self._template = jinja2.Environment().from_string(config["chat_template"])
        self._tokenizer, self._answers, self._version = Tokenizer(folder), answers, version
        self.prompts: list[list[int]] = []
        self.options: list[dict[str, Any]] = []
        self.sampled: list[list[int]] = []

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.options.append(given := body.get("chat_template_kwargs", {}))
        text = self._template.render(messages=body["messages"], add_generation_prompt=True, **given)
        return web.json_response({"tokens": self._tokenizer.encode(text)})

    async def generate(self, request: web.Request) -> web.Response:
        answer = self._answers[len(self.sampled)]
        stop = "</a>" if answer.endswith("</a>") else None
        ids = [*self._tokenizer.encode(answer), *([] if stop else [IM_END])]
        self.prompts.append((await request.json())["token_ids"])
        self.sampled.append(ids)
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
            "weight_versions": [{"start": 0, "end": len(ids), "version": str(self._version)}],
            "finish_reason": "stop",
            "stop_reason": stop,
        }
        return web.json_response({"choices": [choice]})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def dropping(folder: Path) -> Path:
    """Give the model a template that drops thinking."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": DROPS}))
    return folder


THREE = ScriptedEnv(("b?", "c?"), 3)  # turns


def played(server: Server, client: Any, folder: Path, env=THREE, **changes) -> Rollout:
    routes, socket = {"/tokenize": server.tokenize, GENERATE: server.generate}, folder / "vllm.sock"
    where = {"router": router_to(socket), "model": folder}
    setting = chat_settings(**where, is_multi_turn=env.is_multi_turn, num_seqs=3, **changes)

    async def talk() -> Rollout:
        # The client connects before vLLM is up.
        async with client.connect(setting) as chat, served_engine.serving(routes, socket):
            assert chat.slots._number == 3  # as many as all vLLMs together
            sampler = replace(SAMPLER, stop=["</a>"])
            return (await Player(sampler, env, chat).play_group(0, EXAMPLE, 1))[0]

    return asyncio.run(talk())


def assert_sampled(rollout: Rollout, server: Server) -> None:
    """Assert that exactly the sampled tokens are trained, in order."""
    found = [*chain.from_iterable(map(trained, rollout.rows))]
    assert found == [*chain.from_iterable(server.sampled)]
    for row in rollout.rows:
        assert ((row.token_versions == 7) == row.completion_mask).all()
        assert not row.rollout_logprobs[~row.completion_mask].any()


KINDS = pytest.mark.parametrize("kind", [RendererClient, TokensClient])


@KINDS
def test_three_turns_are_one_row_of_exactly_the_sampled_tokens_with_their_stop_text(kind, model):
    server = Server(model, PLAIN)
    rollout = played(server, kind(on_rewrite="fork"), model)
    assert (rollout.reward, rollout.turns) == (2.0, 3)
    assert [m["content"] for m in rollout.messages[1::2]] == ["one", "two", "good"]
    (row,) = rollout.rows
    assert row.token_ids.tolist() == server.prompts[2] + server.sampled[2]
    assert_sampled(rollout, server)


@KINDS
def test_a_template_that_drops_thinking_forks_at_every_turn(kind, model, caplog):
    server = Server(dropping(model), SAID)
    with caplog.at_level(logging.WARNING):
        rollout = played(server, kind(on_rewrite="fork"), model)
    assert "drops the thinking of earlier turns" in caplog.text
    assert "client.on_rewrite=fork applies. Choices: " in caplog.text
    assert len(rollout.rows) == 3  # two forks
    rows = [row.token_ids.tolist() for row in rollout.rows]
    assert rows == [p + s for p, s in zip(server.prompts, server.sampled, strict=True)]
    assert_sampled(rollout, server)


def test_on_rewrite_extend_keeps_thinking_in_one_row(model):
    server = Server(dropping(model), SAID)
    rollout = played(server, RendererClient(on_rewrite="extend"), model)
    (row,) = rollout.rows
    assert row.token_ids.tolist() == server.prompts[2] + server.sampled[2]
    assert_sampled(rollout, server)


@KINDS
def test_rewriting_can_be_refused_and_a_single_turn_rewrites_nothing(kind, model, caplog):
    server = Server(dropping(model), ("good",))
    with pytest.raises(ValueError, match=r"client\.on_rewrite=refuse: set it to"):
        played(server, kind(on_rewrite="refuse"), model)
    assert server.sampled == []
    rollout = played(server, kind(on_rewrite="refuse"), model, ScriptedEnv())
    assert rollout.reward == 2.0
    assert caplog.text == ""


def test_each_tool_call_has_an_id_and_its_mistake():
    text = (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "f"}'
    )
    chat = chat_of(ScriptedClient())
    prompt = asyncio.run(chat.first_prompt([{"role": "user", "content": "hi"}], None))
    ids = tiny_tokenizer().encode(text)
    calls = chat.message(prompt, Completion([*ids, IM_END], [], [], cut_off=False))["tool_calls"]
    found = [(call["id"], call.get("error")) for call in calls]
    missing, unclosed = "the tool call has no name", "the tool call is not closed"
    assert found == [("call_0", None), ("call_1", missing), ("call_2", unclosed)]
    nested = tiny_tokenizer().encode(f"<tool_call>{'[' * 50_000}</tool_call>")
    (call,) = chat.message(prompt, Completion(nested, [], [], cut_off=False))["tool_calls"]
    assert call["error"].startswith("the turn cannot be parsed; it may be nested too deep (Rec")


def test_a_completion_of_an_unknown_format_is_read_as_text(model):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "alien"}))
    assert isinstance(load_parser(model, "auto"), PlainParser)
    server = Server(dropping(model), SAID)
    rollout = played(server, TokensClient(on_rewrite="fork"), model, renderer="auto")
    assert rollout.messages[1]["content"] == SAID[0]  # thinking stays in the text
    assert rollout.reward == 2.0
    assert len(rollout.rows) == 3
    assert_sampled(rollout, server)


def test_a_turn_that_the_template_refuses_is_rendered_as_text(model):
    class Picky(Server):
        async def tokenize(self, request):
            body = await request.json()
            if any("tool_calls" in message for message in body["messages"]):
                return web.Response(status=400, text="arguments must be a mapping")
            return await super().tokenize(request)

    call = '<tool_call>\n{"name": "look"\n</tool_call>'
    server = Picky(model, (call, "two", "good"))
    rollout = played(server, TokensClient(on_rewrite="fork"), model)
    assert (rollout.reward, rollout.turns, rollout.error) == (2.0, 3, "")
    assert_sampled(rollout, server)


def test_the_servers_template_gets_the_options_at_every_turn(model):
    server, options = Server(model, ("1", "2", "3")), {"enable_thinking": False}
    played(server, TokensClient(on_rewrite="fork"), model, renderer_options=options)
    assert len(server.options) >= 3
    assert server.options == [options] * len(server.options)


WIKI = Path(__file__).parents[3] / "models" / "tiny-wiki"


def test_a_token_is_split_where_the_stop_text_begins():
    tokenizer, renderer = Tokenizer(WIKI), load_renderer(WIKI, "qwen3")
    for said, stop, kept in (
        ("The answer is 5.</answer>", "</answer>", "The answer is 5."),
        ("The answer is 5.", "nswer", "The a"),  # begins within the token "an"
        ("stop", "stop", ""),
        ("naïve: five\n\n", "\n\n", "naïve: five"),
        ("abc", "zz", "abc"),  # the decoded text lacks the stop text
    ):
        sampled = Completion(tokenizer.encode(said), [], [], cut_off=False, stop=stop)
        assert tokenizer.decode(tokens_before_stop(renderer, sampled)) == kept


async def said_by(server: Answers, env: Environment, seed=None, **changes):
    sampler = replace(SAMPLER, **changes)
    with server.serving() as url:
        key = "THEIR_KEY"
        client = MessagesClient(url=url, model="them", api_key_variable=key, max_retries=2)
        async with client.connect(chat_settings(sampler=sampler, is_multi_turn=False)) as chat:
            return await Player(sampler, env, chat, seed=seed).play_group(0, EXAMPLE, 1)


async def look(word: str) -> str:
    """Look a word up."""
    return f"{word} means good"


class Tooled(ScriptedEnv):
    """Answer calls of `look`."""

    tools = (look,)
    reply = Environment.reply


@pytest.mark.parametrize("thought", ["reasoning_content", "reasoning"])
async def test_the_arguments_of_a_tool_are_sent_as_text_and_thinking_is_not_sent(thought):
    call = {"type": "function", "function": {"name": "look", "arguments": '{"word": "bon"}'}}
    calls = [call | {"id": "c1"}, call]
    called = completion(None, tool_calls=calls, **{thought: "hm"})
    server = Answers((200, called), (200, completion("good")))
    (rollout,) = await said_by(server, Tooled(max_turns=3), seed=5, stop=["</a>"])
    assert (rollout.reward, rollout.turns, rollout.tool_calls) == (2.0, 2, 2)
    assert rollout.messages[1]["reasoning_content"] == "hm"
    assert rollout.num_completion == 14
    options = {"model": "them", "max_tokens": 32, "temperature": 0.5, "stop": ["</a>"]}
    for body in server.bodies:  # no parameter that only vLLM knows
        assert body == {**options, **{name: body[name] for name in ("messages", "tools", "seed")}}
    assert server.bodies[0]["seed"] != server.bodies[1]["seed"]
    assert server.bodies[0]["tools"][0]["function"]["name"] == "look"
    again = server.bodies[1]["messages"]
    assert again[1].keys() == {"role", "content", "tool_calls"}
    assert again[1]["tool_calls"][0]["function"]["arguments"] == '{"word": "bon"}'
    assert [message["tool_call_id"] for message in again[2:]] == ["c1", "call_1"]  # given, and new
    assert {message["content"] for message in again[2:]} == {"bon means good"}


async def test_a_cut_off_answer_a_full_context_and_an_unusable_server_end_differently():
    cut = {**completion("goo")["choices"][0], "finish_reason": "length"}
    (rollout,) = await said_by(Answers((200, {"choices": [cut]})), ScriptedEnv())
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    full = "This model's maximum context length is 16 tokens"
    (rollout,) = await said_by(Answers((400, full)), ScriptedEnv())
    assert rollout.stop_reason is StopReason.CONTEXT
    with pytest.raises(GenerationError, match=r"client\.url=.*404: .*client\.model=them"):
        await said_by(Answers((404, "no model")), ScriptedEnv())


async def test_a_malformed_tool_call_counts_as_a_mistake_of_the_policy():
    for call in (
        *(7, {}, {"function": {"name": ["look"]}}),
        {"id": 3, "function": {"name": "look", "arguments": "[" * 5000}},
    ):
        server = Answers((200, completion("\ud800", tool_calls=[call])), (200, completion("good")))
        (rollout,) = await said_by(server, Tooled(max_turns=3))
        assert (rollout.reward, rollout.tool_calls, rollout.tool_errors) == (2.0, 1, 1)
        assert rollout.messages[1]["content"] == "\ufffd"
