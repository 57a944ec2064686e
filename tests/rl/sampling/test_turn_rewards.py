"""Rewards by turn: what `score` may return, and what becomes of it."""

import math

import numpy as np
import pytest

from envs.episode import StopReason, rewards_by_name
from tests.support.scripted import ScriptedClient, ScriptedEnv, play


class ByTurn(ScriptedEnv):
    """Three turns; "good" is scored turn by turn."""

    def __init__(self, scored) -> None:
        super().__init__(replies=("more", "more"), max_turns=3)
        self.scored = scored

    async def score(self, episode):
        return self.scored


def test_a_reward_by_turn_is_worth_its_sum_and_is_kept():
    (rollout,) = play(ByTurn({"good": [1, 0.5, 0], "length": 3}), ScriptedClient("a", "b", "c"))
    assert (rollout.turns, rollout.reward) == (3, 3.0)  # good weighs 2
    assert rollout.rewards == {"good": 1.5, "length": 3.0}
    assert rollout.turn_rewards == {"good": (1.0, 0.5, 0.0)}
    assert rollout.rows[0].turns.max() == 2


@pytest.mark.parametrize("part", [[1.0], [1.0] * 4, []])
def test_a_turn_too_few_or_too_many_costs_the_rollout_and_says_what_to_return(part):
    (rollout,) = play(ByTurn({"good": part}), ScriptedClient("a"))
    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENV_ERROR, None)
    assert f"returned {len(part)} numbers for 'good' after 3 turns" in rollout.error
    assert "return one for each turn" in rollout.error


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_turn_that_cannot_be_judged_makes_the_rollout_unscorable(bad):
    (rollout,) = play(ByTurn({"good": [1.0, bad, -bad]}), ScriptedClient("a"))
    assert rollout.reward is None
    assert "returned NaN or infinity for ['good']" in rollout.error


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


@pytest.mark.parametrize("value", [None, "0.5x", [None] * 3, {"a": 1}, np.array(["a"] * 3)])
def test_what_is_no_number_costs_the_rollout(value):
    (rollout,) = play(ByTurn({"good": value}), ScriptedClient("a"))
    assert rollout.stop_reason == StopReason.ENV_ERROR
