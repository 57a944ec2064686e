"""Environments that hold the conversation ask the policy for every turn."""

import pytest

from envs.episode import StopReason
from envs.messages import user
from envs.protocol import ContextFull, Environment
from tests.support.fuzz import FuzzedClient
from tests.support.scripted import HI, IM_END, PREFIX, ScriptedClient, play, tiny_tokenizer


class Driving(Environment):
    """Ask for a turn after each of `replies`, and score 1."""

    name = "driving"
    holds_conversation = True
    reward_weights = {"one": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, *replies):
        self.replies = replies

    async def play(self, episode, speak):
        messages = list(HI)
        spoken = await speak(messages, None)
        for reply in self.replies:
            messages = [*messages, self.repeat(spoken.message), user(reply)]
            spoken = await speak(messages, None)

    def repeat(self, message):
        return message

    async def score(self, episode):
        return {"one": 1.0}


def changed(**methods):
    """Return a Driving environment with two replies and these methods."""
    return type("Mine", (Driving,), methods)("more", "again")


def test_a_conversation_that_only_grows_is_one_row():
    (rollout,) = play(Driving("more"), ScriptedClient("good", "bad"))
    (row,) = rollout.rows
    chosen = row.token_ids[row.completion_mask]
    assert bytes(token for token in chosen if token < 256) == b"goodbad"
    assert (rollout.turns, rollout.reward, rollout.stop_reason) == (2, 1.0, StopReason.STOP)
    assert [m.get("content") for m in rollout.messages] == ["hi", "good", "more", "bad"]
    assert set(row.token_versions[row.completion_mask]) == {7}


def test_a_text_is_scored_after_the_prompt_and_is_not_trained():
    async def talk(self, episode, speak):
        spoken = await speak(list(HI), None)
        assert (spoken.prompt_tokens, spoken.completion_tokens) == (PREFIX, len("good") + 1)
        logprobs = await speak.logprobs(list(HI), "42", after="so ")
        episode.memory["known"] = logprobs, spoken.message["content"]

    async def score(self, episode):
        logprobs, said = episode.memory["known"]
        return {"one": sum(logprobs) if said == "good" else 9.0}

    client = ScriptedClient("good")
    (rollout,) = play(changed(play=talk, score=score), client)
    (row,) = rollout.rows
    assert bytes(t for t in row.token_ids[row.completion_mask] if t < 256) == b"good"
    ((token_ids, version),) = client.scored
    assert (bytes(token_ids[-5:]), version) == (b"so 42", 7)
    assert token_ids[:-5] == row.token_ids[: len(token_ids) - 5].tolist()  # the turn's prompt
    assert rollout.reward == -(ord("4") + ord("2")) / 8


@pytest.mark.parametrize(("count", "num_scored"), [(255 - PREFIX, 1), (256 - PREFIX, 0)])
def test_a_text_that_does_not_fit_ends_the_episode(count, num_scored):
    """The limit is 256 tokens, and vLLM samples one after the text."""

    async def talk(self, episode, speak):
        await speak(list(HI), None)
        await speak.logprobs(list(HI), "9" * count)

    client = ScriptedClient("good")
    (rollout,) = play(changed(play=talk), client)
    assert (rollout.reward, len(client.scored)) == (1.0, num_scored)


def test_additional_keys_of_a_message_do_not_fork_the_rollout():
    def repeat(self, message):
        added = dict.fromkeys(("refusal", "tool_calls"))
        return {"role": "assistant", "content": message["content"], **added}

    (rollout,) = play(changed(repeat=repeat), ScriptedClient("good"))
    assert (len(rollout.rows), rollout.turns, rollout.error) == (1, 3, "")


@pytest.mark.parametrize(
    ("given", "repeated", "num_rows"),
    [('{"a": 1}', '{ "a":1}', 1), ('{"a": 1}', '{"a": 2}', 2), ("{}", "", 1)],
)
def test_the_arguments_of_a_tool_call_may_be_repeated_as_json_text(given, repeated, num_rows):
    def repeat(self, message):
        function = {"name": "look", "arguments": repeated}
        calls = [message["tool_calls"][0] | {"function": function}]
        assert message["content"] == ""  # some clients repeat an empty text as null
        return {**message, "content": None, "tool_calls": calls}

    env = type("Mine", (Driving,), {"repeat": repeat})("more")
    call = f'<tool_call>\n{{"name": "look", "arguments": {given}}}\n</tool_call>'
    said = [[*tiny_tokenizer().encode(text), IM_END] for text in (call, "good")]
    (rollout,) = play(env, FuzzedClient(said))
    assert (len(rollout.rows), rollout.tool_calls, rollout.turns) == (num_rows, 1, 2)


def test_a_changed_history_forks_the_rollout_at_every_turn():
    def repeat(self, message):
        return {"role": "assistant", "content": "something else"}

    (rollout,) = play(changed(repeat=repeat), ScriptedClient("good"))
    assert len(rollout.rows) == 3
    assert rollout.num_completion == 3 * len("good?")


def test_the_policy_sees_the_tools_of_a_later_turn():
    def spec(name):
        return {"name": name, "description": "", "parameters": {"type": "object"}}

    async def changing(self, episode, speak):
        spoken = await speak(list(HI), [spec("first")])
        messages = [*HI, spoken.message, user("more")]
        await speak(messages, [spec("second")] if self.replies else [spec("first")])

    for replies, prompts in ((("changed",), 2), ((), 1)):
        client = ScriptedClient("good")
        env = type("Mine", (Driving,), {"play": changing})(*replies)
        (rollout,) = play(env, client, max_seq_len=4096)
        assert len(rollout.rows) == prompts  # the history was rendered again, or extended
        later = bytes(token for token in client.requests[1][0] if token < 256)
        assert (b"second" in later, b"first" in later) == (prompts == 2, prompts == 1)


def test_each_rollout_of_a_group_sends_its_own_request():
    client = ScriptedClient("good")
    rollouts = play(Driving(), client, group_size=3)
    assert [n for _, _, n, _ in client.requests] == [1, 1, 1]
    assert [r.turns for r in rollouts] == [1, 1, 1]


def test_a_full_context_ends_the_episode_even_if_the_environment_catches_it():
    async def catching(self, episode, speak):
        try:
            await Driving.play(self, episode, speak)
        except ContextFull:
            episode.memory["caught"] = True

    endless, client = Driving(*["more"] * 20), ScriptedClient("good")
    # The second prompt has 50 tokens, and the third has 79.
    for env, limit in ((endless, 60), (changed(play=catching), 60), (endless, 50)):
        (rollout,) = play(env, client, max_seq_len=limit)
        assert (rollout.stop_reason, rollout.error) == (StopReason.CONTEXT, "")
        assert rollout.reward == 1.0
    assert [len(prompt) for prompt, *_ in client.requests] == [PREFIX, 50] * 2 + [PREFIX]


def test_the_stop_reason_of_the_environment_replaces_that_of_the_last_turn():
    (rollout,) = play(Driving(), ScriptedClient("x" * 100))
    assert rollout.stop_reason is StopReason.MAX_TOKENS

    async def knowing(self, episode, speak):
        await Driving.play(self, episode, speak)
        episode.stop_reason = StopReason.MAX_TURNS

    (rollout,) = play(changed(play=knowing), ScriptedClient("x" * 100))
    assert rollout.stop_reason is StopReason.MAX_TURNS
