"""Episodes that the messages client plays against a scripted server."""

from dataclasses import replace

import pytest

from envs.episode import Example, StopReason
from envs.protocol import Environment
from rl.inference.completion import GenerationError
from rl.sampling.chat import checked_call
from rl.sampling.messages_chat import MessagesClient
from rl.sampling.player import Player
from tests.support.answers import Answers
from tests.support.answers import completion as said
from tests.support.scripted import SAMPLER, ScriptedEnv, chat_settings

HI = Example(id=0, env="scripted", messages=[{"role": "user", "content": "hi"}])


async def play(server: Answers, env: Environment, n: int = 1, seed: int | None = None, **changes):
    sampler = replace(SAMPLER, **changes)
    with server.serving() as url:
        key = "THEIR_KEY"
        client = MessagesClient(url=url, model="them", api_key_variable=key, max_retries=2)
        async with client.connect(chat_settings(sampler=sampler, is_multi_turn=False)) as chat:
            return await Player(sampler, env, chat, seed=seed).play_group(0, HI, n)


IDS = ("c1", "call_1")  # of the server, and of a call without one


async def look(word: str) -> str:
    """Look a word up."""
    return f"{word} means good"


class Tooled(ScriptedEnv):
    """Answer calls of `look`."""

    tools = (look,)
    reply = Environment.reply


async def test_an_episode_in_words_is_scored_and_its_tokens_are_counted(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "secret")
    server = Answers((200, said("good")))
    first, second = await play(server, ScriptedEnv(), 2)
    assert (first.reward, second.reward) == (2.0, 2.0)
    assert (first.num_completion, first.rows) == (7, ())
    assert [h["Authorization"] for h in server.headers] == ["Bearer secret"] * 2
    plain = {"model": "them", "messages": HI.messages, "max_tokens": 32, "temperature": 0.5}
    assert server.bodies[0] == plain  # and no parameter that only vLLM knows


async def test_the_server_gets_stop_texts_and_seeds_and_not_too_many_requests_at_once():
    server = Answers((200, said("good")))
    (rollout, _) = await play(server, ScriptedEnv(), 2, seed=5, stop=["</a>"])
    assert rollout.messages[-1]["content"] == "good"  # it has cut the text already
    assert [body["stop"] for body in server.bodies] == [["</a>"]] * 2
    assert len({body["seed"] for body in server.bodies}) == 2
    server = Answers((200, said("good")), seconds=0.1)
    rollouts = await play(server, ScriptedEnv(), 6, max_concurrent=2)
    assert (len(rollouts), server.most_at_once <= 2) == (6, True)


@pytest.mark.parametrize("thought", ["reasoning_content", "reasoning"])
async def test_the_arguments_of_a_tool_are_sent_as_text_and_thinking_is_not_sent(thought):
    call = {"type": "function", "function": {"name": "look", "arguments": '{"word": "bon"}'}}
    calls = [call | {"id": "c1"}, call]
    server = Answers((200, said(None, tool_calls=calls, **{thought: "hm"})), (200, said("good")))
    (rollout,) = await play(server, Tooled(max_turns=3))
    assert (rollout.reward, rollout.turns, rollout.tool_calls) == (2.0, 2, 2)
    assert rollout.messages[1]["reasoning_content"] == "hm"
    assert rollout.num_completion == 14
    assert server.bodies[0]["tools"][0]["function"]["name"] == "look"
    again = server.bodies[1]["messages"]
    assert again[1].keys() == {"role", "content", "tool_calls"}
    assert again[1]["tool_calls"][0]["function"]["arguments"] == '{"word": "bon"}'
    results = [{"role": "tool", "tool_call_id": i, "content": "bon means good"} for i in IDS]
    assert again[2:] == results


async def test_a_cut_off_answer_a_full_context_and_an_unusable_server_end_differently():
    cut = {**said("goo")["choices"][0], "finish_reason": "length"}
    (rollout,) = await play(Answers((200, {"choices": [cut]})), ScriptedEnv())
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    full = "This model's maximum context length is 16 tokens"
    (rollout,) = await play(Answers((400, full)), ScriptedEnv())
    assert rollout.stop_reason is StopReason.CONTEXT
    with pytest.raises(GenerationError, match=r"client\.url=.*404: .*client\.model=them"):
        await play(Answers((404, "no model")), ScriptedEnv())


@pytest.mark.parametrize(
    "call",
    [
        *(7, None, "look", [], {}, {"function": None}, {"function": {"name": ["look"]}}),
        {"id": 3, "function": {"name": "look", "arguments": "[" * 5000}},
        {"function": {"name": "look", "arguments": {"word": ["deep"]}}},
    ],
)
async def test_a_malformed_tool_call_counts_as_a_mistake_of_the_policy(call):
    server = Answers((200, said("\ud800", tool_calls=[call])), (200, said("good")))
    (rollout,) = await play(server, Tooled(max_turns=3))
    assert (rollout.reward, rollout.tool_calls, rollout.tool_errors) == (2.0, 1, 1)
    assert rollout.messages[1]["content"] == "\ufffd"


@pytest.mark.parametrize(
    ("length", "error"), [(200, None), (201, "the tool call's name is too long")]
)
def test_names_and_ids_of_tool_calls_have_at_most_200_characters(length, error):
    call = checked_call("i" * 201, "n" * length, {"a": 1}, "as written")
    assert (call["id"], call.get("error")) == ("i" * 200, error)
    function = ("", "as written") if error else ("n" * 200, {"a": 1})
    assert (call["function"]["name"], call["function"]["arguments"]) == function
