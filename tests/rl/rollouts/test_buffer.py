"""A batch has the oldest groups and waits for those that a later batch could not hold."""

from dataclasses import replace

import pytest

from rl.records import Credit
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from tests.support.rollouts import graded


def difficulty_buffer(**bounds: float) -> DifficultyBuffer:
    names = ("min_spread", "min_reward_variance", "min_reward", "max_reward")
    return DifficultyBuffer(**{**dict.fromkeys(names), "min_spread": 0.0, **bounds})


def filled(*groups: tuple[int, int]) -> FifoBuffer:
    buffer = FifoBuffer()
    for index, version in groups:
        assert buffer.add(graded((1.0, 0.0), index=index, version=version))
    return buffer


def drawn(buffer: FifoBuffer, *settings) -> list[int] | None:
    """Return the drawn indices. `settings`: step, count, staleness limit, running versions."""
    groups = buffer.draw(*settings)
    return None if groups is None else [group.index for group in groups]


def test_the_oldest_are_drawn_first_and_a_batch_waits_for_those_that_later_ones_could_not_hold():
    buffer = filled((5, 2), (3, 1), (4, 2), (2, 1))
    assert drawn(buffer, 2, 3, 1, []) == [2, 3, 4]
    assert len(buffer) == 1
    # Under version 0, 2 groups a batch, at most 2 steps old: six groups are due by step 2.
    buffer = filled((0, 0), (1, 0), (6, 1), (7, 1))
    assert drawn(buffer, 0, 2, 2, [0, 0, 0, 0]) == [0, 1]
    assert drawn(buffer, 1, 2, 2, [0, 0, 0, 0]) is None
    buffer.add(graded((1.0, 0.0), index=2))
    assert drawn(buffer, 1, 2, 2, [0, 0, 0]) is None
    buffer.add(graded((1.0, 0.0), index=3))
    assert drawn(buffer, 1, 2, 2, [0, 0]) == [2, 3]


@pytest.mark.parametrize(("running", "waits"), [([1], True), ([2], False), ([3, 0], True)])
def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next(running, waits):
    groups = filled((0, 2), (1, 2)).draw(2, 2, 1, running)
    assert (groups is None) == waits


def test_a_group_without_a_token_is_rejected():
    buffer, whole = difficulty_buffer(), graded((1.0, 0.0))
    empty = tuple(replace(rollout, rows=()) for rollout in whole.rollouts)
    assert not buffer.add(replace(whole, rollouts=empty))
    assert buffer.add(replace(whole, rollouts=(whole.rollouts[0], empty[1])))
    assert buffer.rejected == {"without_tokens": 1}


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ((), "without_rollouts"),
        ((None, None), "unscorable"),
        ((0.0, 0.0, None), "too_hard"),  # checked before zero spread
        ((0.0, 0.25, None), ""),  # mean 0.125, no longer below
        ((0.75, 1.0), ""),  # mean 0.875, not above
        ((0.9, 1.0), "too_easy"),
        ((0.5, 0.625), "zero_spread"),
        ((0.5, 0.75), ""),  # the least spread that is wanted
        ((0.5, None), "zero_spread"),  # one score has no spread
    ],
)
def test_the_first_reason_rejects_a_group_and_is_counted(rewards, why):
    buffer = difficulty_buffer(min_spread=0.25, min_reward=0.125, max_reward=0.875)
    assert buffer.why_useless(graded(rewards)) == why
    assert buffer.add(graded(rewards)) == (not why)
    assert buffer.rejected == ({why: 1} if why else {})
    assert len(buffer) == (not why)


SPREAD = {"min_spread": 1e-6, "max_reward": 0.9}
VARIANCE = {"min_spread": 1e-6, "min_reward_variance": 0.1875}


@pytest.mark.parametrize(
    ("bounds", "rewards", "shaped", "why"),
    [
        (SPREAD, (0.0, 1.0), (None, 1.0), "zero_spread"),  # one was dropped
        (SPREAD, (0.5, 0.5), (0.5, 0.25), ""),  # they differ by a penalty
        (SPREAD, (1.0, 1.0), (0.0, 0.5), "too_easy"),  # the difficulty is that of plain rewards
        # 0.25: p * (1 - p), and not 0.5, which n - 1 would give
        (VARIANCE, (1.0, 1.0), (0.0, 1.0), ""),
        (VARIANCE, (1.0,) * 4, (0.0, 0.0, 0.0, 1.0), ""),  # 0.1875, the least that is wanted
        (VARIANCE, (1.0,) * 5, (0.0, 0.0, 0.0, 0.0, 1.0), "low_variance"),  # 0.16
        (VARIANCE, (1.0, 1.0), (0.5, 0.5), "zero_spread"),  # the first reason
    ],
)
def test_spread_and_variance_are_those_of_the_shaped_rewards(bounds, rewards, shaped, why):
    credits = tuple(Credit(reward, (0.0,)) for reward in shaped)
    buffer = difficulty_buffer(**bounds)
    assert buffer.why_useless(replace(graded(rewards), credits=credits)) == why


def test_a_group_in_which_every_rollout_is_masked_is_rejected():
    cut, whole = Credit(1.0, (1.0,), trains=False), Credit(0.0, (-1.0,))
    buffer, masked = difficulty_buffer(min_spread=1e-6), graded((1.0, 0.0))
    assert buffer.why_useless(replace(masked, credits=(cut, whole))) == ""
    assert buffer.why_useless(replace(masked, credits=(cut, cut))) == "untrained"
    assert FifoBuffer().why_useless(replace(masked, credits=(cut, cut))) == ""
