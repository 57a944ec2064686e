"""What `score` and `score_group` may return: rewards of episodes, turns and groups, and errors."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest

from envs.episode import Example, StopReason, rewards_by_name
from rl.sampling.player import Player
from rl.sampling.rewarding import with_rewards
from tests.support.scripted import (
    HI,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    play,
    scoring,
)


def single(scored):
    """Return the rollout of an episode whose score returns this."""
    (rollout,) = play(scoring(lambda *_: scored), ScriptedClient("good"))
    return rollout


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_makes_the_rollout_unscorable(value):
    def score(self, episode):
        return {"good": value if episode.text == "bad" else 1.0, "fine": 1.0}

    broken, fine = play(scoring(score), ScriptedClient("bad", "good"), 2)
    assert (broken.reward, fine.reward, fine.error) == (None, 2.0, "")
    assert broken.error == "Mine.score (or score_group) returned NaN or infinity for ['good']"
    assert broken.stop_reason == StopReason.STOP


@pytest.mark.parametrize(
    ("scored", "hint"),
    [
        ({"goood": 1.0}, "only 'goood': did you mean 'goood'\\? "),
        ({"other": 1.0}, r"score_group\(\) returned only 'other': "),
    ],
)
def test_a_weighted_reward_that_score_does_not_return_ends_the_run(scored, hint):
    with pytest.raises(ValueError, match=f"names 'good', but score.*{hint}"):
        single(scored)


@pytest.mark.parametrize(
    ("scored", "said"),
    [
        ({}, "did not return 'good': return 0.0 where a reward does not apply"),
        ({"length": 1.0}, "did not return 'good': return 0.0 where a reward does not apply"),
        ({"good": 1e308}, "sum of {'good': 1e+308} is too large: lower reward_weights"),
    ],
)
def test_a_rollout_that_lacks_a_weighted_reward_after_the_first_is_unscorable(scored, said):
    rollout, checked = single({"good": 1.0}), set()
    assert with_rewards(ScriptedEnv(), rollout, {"good": 1.0}, checked).reward == 2.0
    strict = type("Strict", (ScriptedEnv,), {"reward_weights": {"good": 2.0, "length": -0.5}})()
    assert with_rewards(strict, rollout, {"good": 1.0, "length": 2.0}, checked).reward == 1.0
    unscored = with_rewards(ScriptedEnv(), replace(rollout, reward=None), scored, checked)
    assert (unscored.reward, unscored.rewards) == (None, scored)
    assert said in unscored.error


def test_a_weighted_reward_must_be_returned_and_one_without_a_weight_may_be_any_number():
    rollout = single({})
    assert rollout.reward is None
    assert rollout.error.startswith("Mine.score (or score_group) did not return 'good'")
    env = scoring(lambda *_: {"good": 1.0, "off": math.nan, "log": math.inf})
    env.reward_weights = {"good": 2.0, "off": 0.0, "missing": 0.0}
    (rollout,) = play(env, ScriptedClient("good"))
    assert (rollout.reward, rollout.error) == (2.0, "")


def by_turn(scored):
    """Return the rollout of three turns whose score returns this."""
    env = scoring(lambda *_: scored)
    env.replies, env.max_turns = ("more", "more"), 3
    (rollout,) = play(env, ScriptedClient("a", "b", "c"))
    return rollout


def test_a_reward_by_turn_is_worth_its_sum_and_is_kept():
    rollout = by_turn({"good": [1, 0.5, 0], "length": 3})
    assert (rollout.turns, rollout.reward) == (3, 3.0)  # good weighs 2
    assert rollout.rewards == {"good": 1.5, "length": 3.0}
    assert rollout.turn_rewards == {"good": (1.0, 0.5, 0.0)}
    assert rollout.rows[0].turns.max() == 2


AFTER = "after 3 turns of the policy: return one for each turn"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        *(
            (part, f"returned {len(part)} numbers for 'good' {AFTER}")
            for part in ([1], [1] * 4, [])
        ),
        *(([1.0, bad, -bad], "NaN or infinity for ['good']") for bad in (math.nan, math.inf)),
        *((odd, "raised") for odd in (None, "0.5x", [None] * 3, {"a": 1}, np.array(["a"] * 3))),
    ],
)
def test_wrong_numbers_of_turns_and_what_is_no_number_cost_the_rollout(value, said):
    rollout = by_turn({"good": value})
    assert rollout.reward is None
    assert (rollout.stop_reason == StopReason.ENV_ERROR) == ("NaN" not in said)
    assert said in rollout.error


@pytest.mark.parametrize(
    ("value", "whole", "part"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.array([1, 2, 3]), 6.0, (1.0, 2.0, 3.0)),
        ((1, 2, 3), 6.0, (1.0, 2.0, 3.0)),
        ([1 / 3] * 3, 1.0, (1 / 3,) * 3),  # thirds make a whole
    ],
)
def test_numbers_of_any_kind(value, whole, part):
    assert rewards_by_name({"r": value}, 3) == ({"r": whole}, {"r": part} if part else {})


class Ranked(ScriptedEnv):
    """Rank the answers by length, the shortest first; `good` is only logged."""

    reward_weights = {"rank": 2.0}  # noqa: RUF012 as environments write it

    async def score_group(self, episodes):
        lengths = sorted(len(episode.text) for episode in episodes)
        return [{"rank": -lengths.index(len(episode.text))} for episode in episodes]


def ranked(**methods):
    return type("Mine", (Ranked,), methods)()


def test_the_rewards_of_the_group_join_those_of_each_episode_and_failed_ones_are_left_out():
    rollouts = play(Ranked(), ScriptedClient("four", "good!", "two"), 3)
    assert [rollout.reward for rollout in rollouts] == [-2.0, -4.0, 0.0]
    assert [rollout.rewards["rank"] for rollout in rollouts] == [-1.0, -2.0, 0.0]
    assert all(set(rollout.rewards) == {"good", "length", "rank"} for rollout in rollouts)

    async def score(self, episode):
        if episode.text == "bad":
            raise KeyError("bad")
        return {"good": 1.0}

    rollouts = play(ranked(score=score), ScriptedClient("four", "bad", "two"), 3)
    assert [rollout.reward for rollout in rollouts] == [-2.0, None, 0.0]
    assert "KeyError" in rollouts[1].error


def test_a_plain_function_runs_in_a_thread_and_does_not_hold_up_the_loop():
    def blocking(self, episodes):
        asyncio.run(asyncio.sleep(0))  # raises in the thread of the event loop
        return [{"rank": 1.0} for _ in episodes]

    # In real time, because virtual time does not wait for threads.
    player = Player(SAMPLER, ranked(score_group=blocking), chat_of(ScriptedClient("a")))
    rollouts = asyncio.run(player.play_group(0, Example(3, "scripted", list(HI)), 2))
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]


async def _raises(self, episodes):
    raise ConnectionError("no judge")


async def _hangs(self, episodes):
    await asyncio.sleep(1e6)


@pytest.mark.parametrize(
    ("score_group", "said"),
    [
        (_raises, "no judge"),
        (_hangs, "score_group took longer than sampler.rollout_timeout=60 s"),
        (
            lambda *_: [{"rank": 1.0}],
            "score_group returned 1 results for 2 episodes: return one mapping of rewards for each",
        ),
        (lambda *_: None, "score_group"),
    ],
)
def test_an_error_costs_the_group_and_says_why(score_group, said, caplog):
    rollouts = play(ranked(score_group=score_group), ScriptedClient("a"), 2)
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

    rollouts = play(ranked(score_group=one_is_wrong), ScriptedClient("a", "b"), 2)
    assert [rollout.reward for rollout in rollouts] == [2.0, None]
    assert said in rollouts[1].error
    assert caplog.text.count(said) == 1
