"""Environments that hold the conversation ask the policy for every turn, also of several roles."""

import math
from contextlib import suppress

import pytest

from envs.episode import StopReason
from envs.messages import user
from envs.protocol import ContextFull, Environment
from rl.inference.completion import RequestFailed
from rl.sampling.strategies import AdaptiveSize
from tests.support.fuzz import FuzzedClient
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    ScriptedClient,
    play,
    text,
    tiny_tokenizer,
    trained,
)


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


def changed(*replies, **methods):
    """Return a Driving environment with these replies and methods."""
    return type("Mine", (Driving,), methods)(*replies)


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
    assert text(trained(row)) == b"good"
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
    assert rollout.stop_reason == (StopReason.STOP if num_scored else StopReason.CONTEXT)


def test_a_changed_history_forks_the_rollout_at_every_turn_and_additional_keys_do_not():
    def repeat(self, message):
        added = dict.fromkeys(("refusal", "tool_calls"))
        return {"role": "assistant", "content": message["content"], **added}

    def say_something_else(self, message):
        return {"role": "assistant", "content": "something else"}

    (rollout,) = play(changed("more", "again", repeat=repeat), ScriptedClient("good"))
    assert (len(rollout.rows), rollout.turns, rollout.error) == (1, 3, "")
    forking = changed("more", "again", repeat=say_something_else)
    (rollout,) = play(forking, ScriptedClient("good"))
    assert (len(rollout.rows), rollout.num_completion) == (3, 3 * len("good?"))


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

    env = changed("more", repeat=repeat)
    call = f'<tool_call>\n{{"name": "look", "arguments": {given}}}\n</tool_call>'
    said = [[*tiny_tokenizer().encode(text), IM_END] for text in (call, "good")]
    (rollout,) = play(env, FuzzedClient(said))
    assert (len(rollout.rows), rollout.tool_calls, rollout.turns) == (num_rows, 1, 2)


def test_the_policy_sees_the_tools_of_a_later_turn():
    first, second = ([{"name": name, "description": "", "parameters": {}}] for name in ("f1", "f2"))

    async def changing(self, episode, speak):
        spoken = await speak(list(HI), first)
        await speak([*HI, spoken.message, user("more")], second)

    client = ScriptedClient("good")
    (rollout,) = play(changed(play=changing), client, max_seq_len=4096)
    assert len(rollout.rows) == 2  # the history was rendered again
    later = text(client.requests[1][0])
    assert (b"f1" in later, b"f2" in later) == (False, True)


def test_a_full_context_ends_the_episode_even_if_the_environment_catches_it():
    async def catching(self, episode, speak):
        with suppress(ContextFull):
            await Driving.play(self, episode, speak)

    endless, client = Driving(*["more"] * 20), ScriptedClient("good")
    # The second prompt has 50 tokens, and the third has 79.
    for env, limit in ((endless, 60), (changed("more", "again", play=catching), 60), (endless, 50)):
        (rollout,) = play(env, client, max_seq_len=limit)
        assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.CONTEXT)
    assert [len(prompt) for prompt, *_ in client.requests] == [PREFIX, 50] * 2 + [PREFIX]


class Talking(Environment):
    """Two roles speak by turns; `scores` gives each its rewards."""

    name = "talking"
    holds_conversation = True
    reward_weights = {"won": 1.0}  # noqa: RUF012 as environments write it
    scores = {"first": {"won": 1.0}, "second": {"won": 0.0}}  # noqa: RUF012

    async def play(self, episode, speak):
        talks = {"first": [user("one")], "second": [user("two")]}
        for _ in range(2):
            for role, messages in talks.items():
                spoken = await speak(messages, None, role=role)
                messages += [spoken.message, user("go on")]
        episode.memory["rounds"] = 2

    async def score(self, episode):
        assert episode.memory["rounds"] == 2  # the roles share the memory
        return self.scores[episode.role]


def talking(**attributes):
    return type("Mine", (Talking,), attributes)()


def test_each_role_has_its_own_rollout_and_alternating_turns_do_not_fork():
    first, second = play(Talking(), ScriptedClient("a", "b", "c", "d"))
    found = [(r.role, r.reward, r.turns) for r in (first, second)]
    assert found == [("first", 1.0, 2), ("second", 0.0, 2)]
    assert [[text(trained(row)) for row in r.rows] for r in (first, second)] == [[b"ac"], [b"bd"]]
    assert [m["content"] for m in second.messages] == ["two", "b", "go on", "d"]
    assert [row.turns.max() for r in (first, second) for row in r.rows] == [1, 1]
    assert first.others == ()
    assert {r.stop_reason for r in (first, second)} == {StopReason.STOP}
    first, second = play(Talking(), ScriptedClient("a", "b", "c", "d" * 40))
    assert (first.stop_reason, second.stop_reason) == (StopReason.STOP, StopReason.MAX_TOKENS)


def test_a_role_without_a_reward_is_counted_and_the_other_role_keeps_its_own():
    for given, said in (
        ({}, "returned no reward for the role 'second': return NaN if this role must not"),
        ({"won": [1.0, math.nan]}, "returned NaN or infinity for ['won']"),
        ({"won": math.nan}, ""),  # the environment does not train this role
    ):
        env = talking(scores={"first": {"won": 1.0}, "second": given})
        first, second = play(env, ScriptedClient("a"))
        assert (first.reward, first.error, second.reward) == (1.0, "", None)
        assert said in second.error
        assert bool(second.error) == bool(said)


def test_roles_share_the_number_of_their_episode_and_strategies_read_a_reward_that_is_no_nan():
    async def score(self, episode):
        return {"won": math.nan if episode.role == "first" else float(episode.number)}

    strategy = AdaptiveSize(max_rounds=3)  # ends after the first round in which rewards differ
    rollouts = play(talking(score=score), ScriptedClient("a"), 2, strategy=strategy)
    found = [(r.role, r.reward) for r in rollouts]
    assert found == [("second", 0.0), ("first", None), ("second", 1.0), ("first", None)]
    assert [r.messages[0]["content"] for r in rollouts] == ["two", "one"] * 2


def test_a_wrong_name_of_one_role_and_score_group_of_several_roles_are_refused():
    env = talking(scores={"first": {"won": 1.0}, "second": {"lost": 1.0}})
    with pytest.raises(ValueError, match=r"names 'won', but score.* returned only 'lost'"):
        play(env, ScriptedClient("a"))
    compared = talking(score_group=lambda _, episodes: [{"won": 1.0} for _ in episodes])
    for rollout in play(compared, ScriptedClient("a")):
        assert rollout.error.startswith("several roles spoke, which score_group does not allow")


@pytest.mark.parametrize("answered", [(), ("a",)])
def test_a_failed_request_of_any_role_costs_the_episode_even_if_it_is_caught(answered):
    async def swallow(self, episode, speak):
        with suppress(RequestFailed):
            await Talking.play(self, episode, speak)

    client = ScriptedClient(*answered, RequestFailed("vLLM answered 500"))
    for rollout in play(talking(play=swallow), client):
        assert (rollout.reward, rollout.stop_reason) == (None, StopReason.ENGINE_ERROR)
