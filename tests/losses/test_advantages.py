"""Advantages and token weights against tables worked by hand, and invariants of any group."""

import itertools
import math
import random
from functools import partial

import pytest

from losses import advantages, aggregation
from losses.groups import ScoredGroup

NAN, INF, ROOT3 = math.nan, math.inf, math.sqrt(3)
group_zscore = partial(advantages.group_zscore, epsilon=1e-4)


def of_rewards(advantage):
    """Return the advantage as a function of the group's rewards."""
    return lambda rewards: advantage(ScoredGroup.by_hand(rewards))


FORMULAS = (advantages.group_mean, group_zscore, advantages.rloo, advantages.max_rl)
baselined = pytest.mark.parametrize(
    "advantage", [*map(of_rewards, FORMULAS)], ids=["mean", "zscore", "rloo", "max_rl"]
)

TABLE = [
    # mean 1/4
    (advantages.group_mean, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    # scorable 1, 0, 0.5: mean 0.5; the rest gets 0
    (advantages.group_mean, [1, None, 0, NAN, 0.5, INF, -INF], [0.5, 0, -0.5, 0, 0, 0, 0]),
    # mean 1, deviations 2, -1, -1, variance (4 + 1 + 1) / (3 - 1) = 3; epsilon 0
    (partial(advantages.group_zscore, epsilon=0.0), [3, 0, 0], [2 / ROOT3, -1 / ROOT3, -1 / ROOT3]),
    # mean 0.5, std sqrt(1/2 / 1) = 0.70710678; 0.5 / 0.70720678 = 0.70700679
    (group_zscore, [1, None, 0], [0.7070067953, 0, -0.7070067953]),
    # others' means: 0, 1/3, 1/3, 1/3; the unscorable one is in neither a mean nor K
    (advantages.rloo, [1, 0, NAN, 0, 0], [1, -1 / 3, 0, -1 / 3, -1 / 3]),
    # mean 1/4: (1 - 1/4) / (1/4) = 3, (0 - 1/4) / (1/4) = -1
    (advantages.max_rl, [1, 0, 0, None, 0], [3, -1, -1, 0, -1]),
    (advantages.none, [1, -2.5, None, NAN], [1, -2.5, 0, 0]),
    (advantages.none, [1, 1], [1, 1]),  # `none` has no baseline
]


@pytest.mark.parametrize(("advantage", "rewards", "expected"), TABLE)
def test_advantages_match_the_table(advantage, rewards, expected):
    assert of_rewards(advantage)(rewards) == pytest.approx(expected, abs=1e-9)


@baselined
def test_a_group_without_differences_has_zero_advantages(advantage):
    third = 0.1 + 0.2  # 0.30000000000000004
    equal = ([], [1.0], [1.0, None, NAN], [None, None], [0.0] * 3, [0.3, third, 0.3], [0.0, 1e-6])
    for rewards in equal:
        assert advantage(rewards) == [0.0] * len(rewards)
    assert advantage([1.0, 1.0 + 2e-6])[0] < 0 < advantage([1.0, 1.0 + 2e-6])[1]


@baselined
def test_advantages_sum_to_zero_follow_the_rewards_and_ignore_their_order(advantage):
    rng = random.Random(0)
    for _ in range(50):
        rewards = [rng.choice([0.0, 0.5, 1.0, rng.random()]) for _ in range(rng.randint(2, 16))]
        order = rng.sample(range(len(rewards)), len(rewards))
        worth = advantage(rewards)
        assert math.fsum(worth) == pytest.approx(0.0, abs=1e-12)
        shuffled = advantage([rewards[i] for i in order])
        assert shuffled == pytest.approx([worth[i] for i in order], abs=1e-12)
        for i, j in itertools.pairwise(order):
            assert (rewards[i] > rewards[j]) == (worth[i] > worth[j])


def test_max_rl_refuses_negative_rewards_and_says_what_to_do():
    with pytest.raises(ValueError, match=r"got -1.*use advantage=group_mean, or add"):
        of_rewards(advantages.max_rl)([1.0, -1.0])


def turn_group_mean(turn_rewards, discount):
    rewards = [None if turns is None else sum(turns) for turns in turn_rewards]
    group = ScoredGroup.by_hand(rewards, turn_rewards=turn_rewards)
    assert ScoredGroup.by_hand([2.0, None]).turn_rewards == [(2.0,), None]
    return advantages.turn_group_mean(group, discount=discount)


@pytest.mark.parametrize(
    ("rewards", "discount", "expected"),
    [
        # 1 + 2 / 2, 2 and 4 + 1 / 2, 1; baselines: 3.25 and 1.5.
        ([[1, 2], [4, 1]], 0.5, [[-1.25, 0.5], [1.25, -0.5]]),
        # Each turn by itself; baselines: 0.5 and 1.5.
        ([[1, 2], [0, 1]], 0.0, [[0.5, 0.5], [-0.5, -0.5]]),
        # Only one rollout has a third turn, two have a second.
        # Returns: 2 / 4, 3, 1 / 1, 1; baselines: 7/3 and 2.
        ([[2], [1, 2, 1], [0, 1]], 1.0, [[-1 / 3], [5 / 3, 1, 0], [-4 / 3, -1]]),
        # The second rollout is unscorable, so the first has no rollout to compare with.
        ([[1, 2], None], 1.0, [[0, 0], []]),
        ([[1, 5], None, [0, 5]], 1.0, [[0.5, 0], [], [-0.5, 0]]),  # equal from the second turn on
        ([], 1.0, []),
    ],
)
def test_a_turn_is_compared_with_the_same_turn_of_the_others(rewards, discount, expected):
    found = turn_group_mean(rewards, discount)
    assert [pytest.approx(numbers) for numbers in expected] == found


# lengths 2, 6 of prompt 7; 0, 12 of prompt 3; 0 of prompt 5
LENGTHS, GROUP_IDS = [2, 6, 0, 12, 0], [7, 7, 3, 3, 5]
WEIGHTS = {
    "token_mean": (aggregation.token_mean, [1 / 20, 1 / 20, 0, 1 / 20, 0]),
    # 3 sequences with tokens
    "sequence_mean": (aggregation.sequence_mean, [1 / 6, 1 / 18, 0, 1 / 36, 0]),
    "constant_length": (
        partial(aggregation.constant_length, length=10),
        [1 / 30, 1 / 30, 0, 1 / 30, 0],
    ),
    # prompts of 8 and 12 tokens, and one without
    "prompt_mean": (aggregation.prompt_mean, [1 / 16, 1 / 16, 0, 1 / 24, 0]),
}


@pytest.mark.parametrize(("aggregate", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_match_the_table_and_depend_on_no_order_and_no_empty_sequence(aggregate, expected):
    assert aggregate(LENGTHS, GROUP_IDS) == pytest.approx(expected, abs=1e-15)
    order = [2, 0, 4, 3, 1]
    shuffled = aggregate([LENGTHS[i] for i in order], [GROUP_IDS[i] for i in order])
    assert shuffled == pytest.approx([expected[i] for i in order], abs=1e-15)
    assert aggregate([2, 0, 6], [1, 1, 2])[::2] == aggregate([2, 6], [1, 2])
    assert aggregate([], []) == []
    assert aggregate([0, 0], [1, 2]) == [0.0, 0.0]


def test_every_turn_with_tokens_weighs_the_same():
    assert aggregation.turn_mean([[2, 0, 4], [1]], [0, 0]) == [[1 / 6, 0, 1 / 12], [1 / 3]]
    assert aggregation.turn_mean([[0], []], [0, 1]) == [[0.0], []]
