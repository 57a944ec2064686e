"""A stop text ends a turn: it is trained on and in the history, but not in the message."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.model.tokenizer import Tokenizer, load_parser, load_renderer
from rl.sampling.renderer_chat import tokens_before_stop
from rl.sampling.tokens_chat import TokensChat
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    play,
    text,
    tiny_model,
    tiny_renderer,
    trained,
)
from tests.support.virtual_time import run_virtually

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


def test_a_turn_without_the_stop_text_ends_at_its_limit():
    (rollout,) = play(ScriptedEnv(), StoppingClient("x" * 40), sampler=STOPPING)
    assert rollout.stop_reason == "max_tokens"
    assert rollout.messages[-1]["content"] == "x" * 32


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
