"""Several roles of one policy play an episode; each has a rollout of its own."""

import math
from contextlib import suppress
from dataclasses import replace

import pytest

from envs.episode import StopReason
from envs.messages import user
from envs.protocol import Environment
from rl.inference.completion import RequestFailed
from rl.sampling.strategies import AdaptiveSize
from tests.support.scripted import SAMPLER, ScriptedClient, play


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


def changed(**attributes):
    return type("Mine", (Talking,), attributes)()


def text(row):
    return bytes(t for t in row.token_ids[row.completion_mask] if t < 256)


def test_each_role_has_its_own_rollout_and_alternating_turns_do_not_fork():
    first, second = play(Talking(), ScriptedClient("a", "b", "c", "d"))
    assert [(r.role, r.reward, r.turns) for r in (first, second)] == [
        ("first", 1.0, 2),
        ("second", 0.0, 2),
    ]
    assert [[text(row) for row in r.rows] for r in (first, second)] == [[b"ac"], [b"bd"]]
    assert [m["content"] for m in second.messages] == ["two", "b", "go on", "d"]
    assert [row.turns.max() for r in (first, second) for row in r.rows] == [1, 1]
    assert first.others == ()
    assert {r.stop_reason for r in (first, second)} == {StopReason.STOP}


def test_a_group_has_the_roles_of_every_episode():
    rollouts = play(Talking(), ScriptedClient("a"), group_size=3)
    assert [r.role for r in rollouts] == ["first", "second"] * 3


def test_a_role_whose_turn_was_cut_off_has_its_own_stop_reason():
    first, second = play(Talking(), ScriptedClient("a", "b", "c", "d" * 40))
    assert (first.stop_reason, second.stop_reason) == (StopReason.STOP, StopReason.MAX_TOKENS)


@pytest.mark.parametrize(
    ("given", "reward", "said"),
    [
        ({}, None, "returned no reward for the role 'second': return NaN if this role must not"),
        ({"won": math.nan}, None, "returned NaN or infinity for ['won']"),
    ],
)
def test_a_role_without_a_reward_is_counted_and_the_other_role_keeps_its_own(given, reward, said):
    env = changed(scores={"first": {"won": 1.0}, "second": given})
    first, second = play(env, ScriptedClient("a"))
    assert (first.reward, first.error) == (1.0, "")
    assert second.reward is reward
    assert said in second.error


def test_strategies_read_the_reward_of_a_role_that_has_one():
    env = changed(score=lambda self, episode: _scored(episode))
    strategy = AdaptiveSize(max_rounds=3)  # ends after the first round in which rewards differ
    rollouts = play(env, ScriptedClient("a"), group_size=2, strategy=strategy)
    assert [(r.role, r.reward) for r in rollouts] == [
        *(("second", 0.0), ("first", None)),
        *(("second", 1.0), ("first", None)),
    ]
    assert [r.messages[0]["content"] for r in rollouts] == ["two", "one"] * 2


async def _scored(episode):
    return {"won": math.nan if episode.role == "first" else float(episode.number)}


def test_a_wrong_name_of_one_role_is_refused():
    env = changed(scores={"first": {"won": 1.0}, "second": {"lost": 1.0}})
    with pytest.raises(ValueError, match=r"names 'won', but score.* returned only 'lost'"):
        play(env, ScriptedClient("a"))


def test_an_error_costs_all_roles_of_the_episode():
    async def broken(self, episode):
        raise KeyError(episode.role)

    for rollout in play(changed(score=broken), ScriptedClient("a")):
        assert (rollout.reward, rollout.stop_reason) == (None, StopReason.ENV_ERROR)
        assert "raised KeyError: 'first'" in rollout.error


FAILED = RequestFailed("vLLM answered 500")


@pytest.mark.parametrize("answers", [(FAILED,), ("a", FAILED), ("a", "b", "c", FAILED)])
def test_a_failed_request_of_any_role_costs_the_episode_even_if_it_is_caught(answers):
    async def swallow(self, episode, speak):
        with suppress(RequestFailed):
            await Talking.play(self, episode, speak)

    env, sampler = changed(play=swallow), replace(SAMPLER, max_retries=0)
    for rollout in play(env, ScriptedClient(*answers), sampler=sampler):
        assert (rollout.reward, rollout.stop_reason) == (None, StopReason.ENGINE_ERROR)


def test_rewards_that_compare_a_group_are_refused_with_several_roles():
    async def score_group(self, episodes):
        return [{"won": 1.0} for _ in episodes]

    for rollout in play(changed(score_group=score_group), ScriptedClient("a")):
        assert rollout.error == "several roles spoke, which score_group does not allow: use score"


def test_a_repeated_episode_is_counted_for_each_of_its_roles():
    class Failing(Talking):
        failures = 1

        async def play(self, episode, speak):
            await super().play(episode, speak)
            if self.failures:
                self.failures -= 1
                raise RuntimeError("once")

    sampler = replace(SAMPLER, max_retries=2)
    rollouts = play(Failing(), ScriptedClient("a"), sampler=sampler)
    assert [(r.role, r.retries, r.error) for r in rollouts] == [("first", 1, ""), ("second", 1, "")]


def test_episodes_of_a_group_are_numbered_and_roles_share_the_number():
    async def score(self, episode):
        return {"won": float(episode.number)}

    rollouts = play(changed(score=score), ScriptedClient("a"), group_size=3)
    assert [r.reward for r in rollouts] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
