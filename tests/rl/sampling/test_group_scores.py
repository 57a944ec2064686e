"""Rewards that compare the episodes of a group: what `score_group` may return, and its errors."""

import asyncio
import math

import pytest

from envs.episode import Example, StopReason
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, play, tiny_renderer


class Ranked(ScriptedEnv):
    """Rank the answers by length, the shortest first; `good` is only logged."""

    reward_weights = {"rank": 2.0}  # noqa: RUF012 as environments write it

    async def score_group(self, episodes):
        lengths = sorted(len(episode.text) for episode in episodes)
        return [{"rank": -lengths.index(len(episode.text))} for episode in episodes]


def scoring_groups(score_group):
    return type("Mine", (Ranked,), {"score_group": score_group})()


def test_the_rewards_of_the_group_join_those_of_each_episode():
    rollouts = play(Ranked(), ScriptedClient("four", "good!", "two"), 3)
    assert [rollout.reward for rollout in rollouts] == [-2.0, -4.0, 0.0]
    assert [rollout.rewards["rank"] for rollout in rollouts] == [-1.0, -2.0, 0.0]
    assert all(set(rollout.rewards) == {"good", "length", "rank"} for rollout in rollouts)


def test_a_plain_function_runs_in_a_thread_and_does_not_hold_up_the_loop():
    def blocking(self, episodes):
        asyncio.run(asyncio.sleep(0))  # raises in the thread of the event loop
        return [{"rank": 1.0} for _ in episodes]

    # In real time, because virtual time does not wait for threads.
    chat = RendererChat(SAMPLER, tiny_renderer(), ScriptedClient("a"), 256, LiveVersion(7))
    player = Player(SAMPLER, scoring_groups(blocking), chat)
    rollouts = asyncio.run(player.play_group(0, Example(3, "scripted", list(HI)), 2))
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]


def test_episodes_that_failed_are_left_out_and_stay_without_a_score():
    async def score(self, episode):
        if episode.text == "bad":
            raise KeyError("bad")
        return {"good": 1.0}

    env = type("Mine", (Ranked,), {"score": score})()
    rollouts = play(env, ScriptedClient("four", "bad", "two"), 3)
    assert [rollout.reward for rollout in rollouts] == [-2.0, None, 0.0]
    assert "KeyError" in rollouts[1].error


async def _raises(self, episodes):
    raise ConnectionError("no judge")


async def _hangs(self, episodes):
    await asyncio.sleep(1e6)


async def _too_few(self, episodes):
    return [{"rank": 1.0}]


async def _nothing(self, episodes):
    return None


@pytest.mark.parametrize(
    ("score_group", "said"),
    [
        (_raises, "no judge"),
        (_hangs, "score_group took longer than sampler.rollout_timeout=60 s"),
        (_too_few, "returned 1 results for 2 episodes: return one mapping of rewards for each"),
        (_nothing, "score_group"),
    ],
)
def test_an_error_costs_the_group_and_says_why(score_group, said, caplog):
    rollouts = play(scoring_groups(score_group), ScriptedClient("a"), 2)
    assert caplog.text.count(said) == 1
    assert [rollout.reward for rollout in rollouts] == [None, None]
    assert {rollout.stop_reason for rollout in rollouts} == {StopReason.ENV_ERROR}
    assert all(said in rollout.error for rollout in rollouts)


@pytest.mark.parametrize(
    ("reward", "said"),
    [({"rank": math.nan}, "NaN or infinity for ['rank']"), ({}, "did not return 'rank'")],
)
def test_a_wrong_reward_costs_only_its_rollout_and_is_logged(reward, said, caplog):
    async def one_is_wrong(self, episodes):
        return [reward if episode.text == "b" else {"rank": 1.0} for episode in episodes]

    rollouts = play(scoring_groups(one_is_wrong), ScriptedClient("a", "b"), 2)
    assert [rollout.reward for rollout in rollouts] == [2.0, None]
    assert said in rollouts[1].error
    assert caplog.text.count(said) == 1


def test_a_weight_without_its_reward_ends_the_run():
    async def misnamed(self, episodes):
        return [{"ranks": 1.0} for _ in episodes]

    with pytest.raises(ValueError, match="did you mean 'ranks'"):
        play(scoring_groups(misnamed), ScriptedClient("a"), 2)
