"""Environments that hold the conversation themselves and ask the policy for every turn."""

import pytest

from envs.episode import StopReason
from envs.messages import user
from envs.protocol import ContextFull, Environment
from rl.inference.completion import GenerationError
from tests.support.scripted import HI, ScriptedClient, play


class Driving(Environment):
    """Asks for a turn after each of `replies`, and scores 1."""

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
    """A Driving environment with two replies and these methods."""
    return type("Mine", (Driving,), methods)("more", "again")


def test_a_conversation_that_goes_on_stays_one_row():
    (rollout,) = play(Driving("more"), ScriptedClient("good", "bad"))
    (row,) = rollout.rows
    chosen = row.token_ids[row.completion_mask]
    assert bytes(token for token in chosen if token < 256) == b"goodbad"
    assert (rollout.turns, rollout.reward, rollout.stop_reason) == (2, 1.0, StopReason.STOP)
    assert [m.get("content") for m in rollout.messages] == ["hi", "good", "more", "bad"]
    assert set(row.token_versions[row.completion_mask]) == {7}


def test_a_client_that_adds_keys_of_its_own_still_extends_the_row():
    def repeat(self, message):
        return {"role": "assistant", "content": message["content"], "refusal": None}

    (rollout,) = play(changed(repeat=repeat), ScriptedClient("good"))
    assert len(rollout.rows) == 1


def test_a_changed_history_starts_a_row_for_every_turn():
    def repeat(self, message):
        return {"role": "assistant", "content": "something else"}

    (rollout,) = play(changed(repeat=repeat), ScriptedClient("good"))
    assert len(rollout.rows) == 3
    assert rollout.num_completion == 3 * len("good?")


def test_other_tools_in_a_later_turn_are_shown_to_the_policy():
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
        assert len(rollout.rows) == prompts  # the history was rendered anew, or extended
        later = bytes(token for token in client.requests[1][0] if token < 256)
        assert (b"second" in later, b"first" in later) == (prompts == 2, prompts == 1)


def test_the_rollouts_of_a_group_are_played_one_by_one_even_with_one_turn():
    client = ScriptedClient("good")
    rollouts = play(Driving(), client, group_size=3)
    assert [n for _, _, n, _ in client.requests] == [1, 1, 1]
    assert [r.turns for r in rollouts] == [1, 1, 1]


def test_a_full_context_ends_the_episode_whether_it_is_caught_or_not():
    async def catching(self, episode, speak):
        try:
            await Driving.play(self, episode, speak)
        except ContextFull:
            episode.memory["caught"] = True

    for env in (Driving(*["more"] * 20), changed(play=catching)):
        (rollout,) = play(env, ScriptedClient("good"), max_seq_len=60)
        assert (rollout.stop_reason, rollout.error) == (StopReason.CONTEXT, "")
        assert rollout.reward == 1.0


def test_the_last_turns_cut_is_the_stop_reason_unless_the_environment_knows_better():
    (rollout,) = play(Driving(), ScriptedClient("x" * 100))
    assert rollout.stop_reason is StopReason.MAX_TOKENS

    async def knowing(self, episode, speak):
        await Driving.play(self, episode, speak)
        episode.stop_reason = StopReason.MAX_TURNS

    (rollout,) = play(changed(play=knowing), ScriptedClient("x" * 100))
    assert rollout.stop_reason is StopReason.MAX_TURNS


def test_what_it_raises_costs_the_rollout():
    async def broken(self, episode, speak):
        await speak(list(HI), None)
        raise KeyError("lost")

    (rollout,) = play(changed(play=broken), ScriptedClient("good"))
    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENV_ERROR, None)
    assert "Mine.play raised KeyError: 'lost'" in rollout.error


def test_a_failure_of_the_engine_is_not_the_environments_even_where_that_swallows_it():
    async def swallowing(self, episode, speak):
        try:
            await speak(list(HI), None)
        except GenerationError:
            return

    with pytest.raises(GenerationError, match="gone"):
        play(changed(play=swallowing), ScriptedClient(GenerationError("gone")))
