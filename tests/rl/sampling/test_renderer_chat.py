"""Each client plays whole conversations over a socket as one row or as forks, with stop texts."""

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import pytest
from aiohttp import web

from envs.episode import Example
from rl.inference.client import VLLMClient
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.model.tokenizer import PlainParser, Tokenizer, load_parser, load_renderer
from rl.records import Rollout
from rl.sampling.chat import ChatSettings
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererClient, tokens_before_stop
from rl.sampling.tokens_chat import TokensChat, TokensClient
from tests.support import served_engine
from tests.support.replicas import router_to
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    chat_settings,
    play,
    text,
    tiny_model,
    tiny_renderer,
    tiny_tokenizer,
    trained,
)
from tests.support.served_engine import GENERATE
from tests.support.virtual_time import run_virtually

SAID = ("<think>\nfirst\n</think>\n\none", "<think>\nthen\n</think>\n\ntwo", "good")
PLAIN = ("one", "two", "good")
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
        if any(message["role"] == "alien" for message in body["messages"]):
            return web.Response(status=400, text="no such role")
        self.options.append(given := body.get("chat_template_kwargs", {}))
        text = self._template.render(messages=body["messages"], add_generation_prompt=True, **given)
        return web.json_response({"tokens": self._tokenizer.encode(text)})

    async def generate(self, request: web.Request) -> web.Response:
        ids = [*self._tokenizer.encode(self._answers[len(self.sampled)]), IM_END]
        self.prompts.append((await request.json())["token_ids"])
        self.sampled.append(ids)
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -0.5} for _ in ids]},
            "weight_versions": [{"start": 0, "end": len(ids), "version": str(self._version)}],
            "finish_reason": "stop",
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


def setting_of(folder: Path, **changes: Any) -> ChatSettings:
    return chat_settings(router=router_to(folder / "vllm.sock"), model=folder, **changes)


def played(server: Server, client: Any, folder: Path, env=THREE, **changes) -> Rollout:
    setting = setting_of(folder, is_multi_turn=env.is_multi_turn, **changes)

    async def talk() -> Rollout:
        async with client.connect(setting) as chat:
            return (await Player(SAMPLER, env, chat).play_group(0, EXAMPLE, 1))[0]

    return asyncio.run(serving(server, folder / "vllm.sock", talk()))


async def serving(server: Server, socket: Path, main: Coroutine[Any, Any, Any]) -> Any:
    routes = {"/tokenize": server.tokenize, GENERATE: server.generate}
    async with served_engine.serving(routes, socket):
        return await main


def assert_sampled(rollout: Rollout, server: Server) -> None:
    """Assert that exactly the sampled tokens are trained, in order."""
    found = [*chain.from_iterable(map(trained, rollout.rows))]
    assert found == [*chain.from_iterable(server.sampled)]
    for row in rollout.rows:
        assert ((row.token_versions == 7) == row.completion_mask).all()
        assert not row.rollout_logprobs[~row.completion_mask].any()


KINDS = pytest.mark.parametrize("kind", [RendererClient, TokensClient])


@KINDS
def test_three_turns_are_one_row_of_exactly_the_sampled_tokens(kind, model):
    server = Server(model, PLAIN)
    rollout = played(server, kind(on_rewrite="fork"), model)
    assert (rollout.reward, rollout.turns) == (2.0, 3)
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


async def test_the_first_group_probes_the_template_of_the_server(model):
    server = Server(dropping(model), PLAIN)
    connected = TokensClient(on_rewrite="fork").connect(setting_of(model))
    async with connected as chat:  # vLLM is not up yet
        player = Player(SAMPLER, THREE, chat)
        (rollout,) = await serving(server, model / "vllm.sock", player.play_group(0, EXAMPLE, 1))
    assert rollout.reward == 2.0


def test_on_rewrite_extend_keeps_thinking_in_one_row(model):
    server = Server(dropping(model), SAID)
    rollout = played(server, RendererClient(on_rewrite="extend"), model)
    (row,) = rollout.rows
    assert row.token_ids.tolist() == server.prompts[2] + server.sampled[2]
    assert_sampled(rollout, server)


@pytest.mark.parametrize("holds_conversation", [False, True])
@KINDS
def test_rewriting_can_be_refused_before_the_first_request(kind, holds_conversation, model):
    env = ScriptedEnv(("b?", "c?"), 3)
    env.holds_conversation = holds_conversation
    server = Server(dropping(model), SAID)
    with pytest.raises(ValueError, match=r"client\.on_rewrite=refuse: set it to"):
        played(server, kind(on_rewrite="refuse"), model, env)
    assert server.sampled == []


@KINDS
def test_a_single_turn_rewrites_nothing(kind, model, caplog):
    server = Server(dropping(model), ("good",))
    rollout = played(server, kind(on_rewrite="refuse"), model, ScriptedEnv())
    assert rollout.reward == 2.0
    assert caplog.text == ""


@KINDS
async def test_a_chat_has_as_many_slots_as_all_vllms_together(kind, model):
    async with kind(on_rewrite="fork").connect(setting_of(model, num_seqs=3)) as chat:
        assert chat.slots._number == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {}}\n</tool_call>',
            [("call_0", None), ("call_1", "the tool call has no name")],
        ),
        ('<tool_call>\n{"name": \n</tool_call>', [("call_0", "the tool call is not valid JSON")]),
        ('<tool_call>\n{"name": "f"}', [("call_0", "the tool call is not closed")]),
    ],
)
def test_each_tool_call_has_an_id_and_its_mistake(text, expected):
    chat = chat_of(ScriptedClient())
    prompt = asyncio.run(chat.first_prompt([{"role": "user", "content": "hi"}], None))
    ids = tiny_tokenizer().encode(text)
    calls = chat.message(prompt, Completion([*ids, IM_END], [], [], cut_off=False))["tool_calls"]
    assert [(call["id"], call.get("error")) for call in calls] == expected


def test_an_unknown_format_is_read_as_text_and_an_unknown_renderer_is_refused(model):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "alien"}))
    assert isinstance(load_parser(model, "auto"), PlainParser)
    server = Server(dropping(model), SAID)
    rollout = played(server, TokensClient(on_rewrite="fork"), model, renderer="auto")
    assert rollout.messages[1]["content"] == SAID[0]  # thinking stays in the text
    assert rollout.reward == 2.0
    assert len(rollout.rows) == 3
    assert_sampled(rollout, server)
    said = r"model\.renderer=qwen33 does not exist: did you mean 'qwen3'"
    with pytest.raises(ValueError, match=said):
        load_parser(model, "qwen33")


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


async def test_a_conversation_that_the_template_refuses_is_a_value_error(model):
    async def ask() -> list[int]:
        async with VLLMClient(router_to(model / "s.sock"), model="policy", timeout=5) as client:
            with client.group() as group:
                return await group.tokenize([{"role": "alien", "content": ""}], None)

    with pytest.raises(ValueError, match="template rejects the conversation: no such role"):
        await serving(Server(model, ()), model / "s.sock", ask())


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_the_servers_template_gets_the_options_at_every_turn(model, options):
    server = Server(model, ("1", "2", "3"))
    played(server, TokensClient(on_rewrite="fork"), model, renderer_options=options)
    assert len(server.options) >= 3
    assert server.options == [options] * len(server.options)


WIKI = Path(__file__).parents[3] / "models" / "tiny-wiki"
STOPPING = replace(SAMPLER, stop=["</a>", "!"])


class StoppingClient(ScriptedClient):
    """End an answer with the token that completes a stop text, as vLLM does."""

    async def generate(self, prompt_ids, sampling, *, n, version):
        answers = await super().generate(prompt_ids, sampling, n=n, version=version)
        return [self._stopped(answer, sampling.get("stop", [])) for answer in answers]

    def _stopped(self, answer: Completion, stops: list[str]) -> Completion:
        said = text(answer.token_ids).decode()
        ends = [(said.index(stop) + len(stop), stop) for stop in stops if stop in said]
        if not ends:
            return answer
        end, stop = min(ends)
        columns = ("token_ids", "logprobs", "versions")
        cut = {name: getattr(answer, name)[:end] for name in columns}
        return replace(answer, **cut, cut_off=False, stop=stop)


def test_several_turns_are_one_row_with_the_stop_texts():
    client = StoppingClient("one</a>x", "two!x", "good</a>")
    env = ScriptedEnv(replies=("again", "again"), max_turns=3)
    (rollout,) = play(env, client, sampler=STOPPING)
    assert (rollout.stop_reason, rollout.reward) == ("stop", 2.0)
    (row,) = rollout.rows
    said = [m["content"] for m in rollout.messages if m["role"] == "assistant"]
    assert said == ["one", "two", "good"]
    whole = bytes(token if token < 256 else ord("|") for token in row.token_ids.tolist()).decode()
    assert "one</a>|\n|user\nagain" in whole  # the turn is closed by the format, not by the policy
    assert text(trained(row)) == b"one</a>two!good</a>"
    assert client.requests[0][1]["stop"] == ["</a>", "!"]
    without = StoppingClient("good!")
    play(ScriptedEnv(), without)
    assert "stop" not in without.requests[0][1]


def test_a_tool_call_before_the_stop_text_is_parsed():
    called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    renderer = tiny_renderer()
    spoken = renderer.render_ids(
        [*HI, {"role": "assistant", "content": called}], tools=None, add_generation_prompt=False
    )
    chat = chat_of(ScriptedClient(), STOPPING)
    prompt = run_virtually(chat.first_prompt(list(HI), None))
    ids = spoken[PREFIX : spoken.index(IM_END, PREFIX)]
    whole = Completion(ids, [], [], cut_off=False, prompt_ids=prompt.token_ids)
    stopped = replace(whole, token_ids=[*ids, *b"then!"], stop="!")
    message = chat.message(prompt, stopped)
    assert message.get("tool_calls") == chat.message(prompt, whole).get("tool_calls")
    assert "!" not in message["content"]


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [
        ("The answer is 5.</answer>", "</answer>", "The answer is 5."),
        ("The answer is 5.", "er", "The answ"),  # begins within a word and ends within one
        ("stop", "stop", ""),
        ("naïve: five\n\n", "\n\n", "naïve: five"),
        ("é\n", "\n", "é"),
        ("abc", "zz", "abc"),  # the decoded text lacks the stop text
    ],
)
def test_a_token_is_split_where_the_stop_text_begins(said, stop, kept):
    tokenizer, renderer = Tokenizer(WIKI), load_renderer(WIKI, "qwen3")
    completion = Completion(tokenizer.encode(said), [], [], cut_off=False, stop=stop)
    assert tokenizer.decode(tokens_before_stop(renderer, completion)) == kept


def test_the_template_of_the_server_gets_the_stop_text(tmp_path):
    asked = []

    class Template(ScriptedClient):
        async def tokenize(self, messages, tools, *_):
            asked.append(messages)
            return [1, 2, 3]

    renderer = load_parser(tiny_model(tmp_path), "qwen3")
    connected = TokensChat(STOPPING, renderer, Template(), 256, LiveVersion(7))
    reply = [{"role": "user", "content": "why"}]
    with connected.group() as chat:
        prompt = run_virtually(chat.first_prompt(list(HI), None))
        completion = Completion([*b"5</a>"], [], [], cut_off=False, stop="</a>")
        message = chat.message(prompt, completion)
        run_virtually(chat.next_prompt(prompt, completion, message, reply))
    assert message["content"] == "5"
    assert [m["content"] for m in asked[-1]] == ["hi", "5</a>", "why"]


def test_a_cancelled_group_does_not_cancel_the_test_of_the_template(tmp_path):
    class Slow(ScriptedClient):
        async def tokenize(self, messages, *_):
            await asyncio.sleep(1.0)
            self.requests.append(messages)
            return [1, 2, 3]

    async def check(chat):
        first, second = (asyncio.create_task(chat.check_server()) for _ in range(2))
        await asyncio.sleep(0.5)
        first.cancel()
        await asyncio.wait([first])
        await second
        return first.cancelled()

    renderer, client = load_parser(tiny_model(tmp_path), "qwen3"), Slow()
    connected = TokensChat(SAMPLER, renderer, client, 256, LiveVersion(7), on_rewrite="fork")
    with connected.group() as chat:
        assert run_virtually(check(chat))
    assert len(client.requests) == 2  # the two prompts of one test


@pytest.mark.parametrize(
    ("stop", "sentence"),
    [
        (["a", ""], "sampler.stop contains an empty text, which would end every turn: remove it"),
        (list("abcde"), "sampler.stop has 5 texts, but the OpenAI API accepts 4: remove some"),
    ],
)
def test_invalid_stop_texts_are_refused(stop, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(SAMPLER, stop=stop)
    replace(SAMPLER, stop=list("abcd"))
