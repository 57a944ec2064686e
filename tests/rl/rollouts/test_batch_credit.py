"""Batch credits by hand: advantages are normalised over the batch, before the plan."""

import math
from dataclasses import replace
from random import Random

import pytest

from envs.episode import Example, StopReason
from losses.advantages import group_mean, group_zscore
from losses.advantages import none as no_baseline
from rl.config.build import build
from rl.records import Credit, Group, Rollout
from rl.rollouts.batch_credit import apply_batch_credit, none, whiten
from rl.rollouts.credit import GroupCredit
from rl.rollouts.truncation import keep
from rl.runtime.failure import RunFailed
from tests.support.composing import chosen


def group(*credits: Credit) -> Group:
    rollout = Rollout((), [], 0.0, {}, StopReason.STOP, turns=1, generation_time=0.0)
    return Group(0, Example(0, "e", []), 0, (rollout,) * len(credits), credits)


def of(*advantages: float) -> Credit:
    return Credit(1.0, advantages)


def numbers(groups: list[Group]) -> list[list[tuple[float, ...]]]:
    return [
        [credit.advantages for credit in each.credits]
        for each in apply_batch_credit(groups, whiten)
    ]


UNSCORED = Credit(None, (0.0,), trains=False)
MASKED = Credit(3.0, (9.0,), trains=False)
S = math.sqrt(2.5)  # of 1, 2, 3, 4, 5: squares 4 + 1 + 0 + 1 + 4, over 4
TABLE = {
    "rollouts of two groups": (
        [[of(1.0), of(2.0), of(3.0)], [of(4.0), of(5.0)]],
        [[(-2 / S,), (-1 / S,), (0.0,)], [(1 / S,), (2 / S,)]],
    ),
    # Neither is in mean and std. The rollout without a score keeps 0.
    "rollouts without a score, and masked": (
        [[of(1.0), of(2.0), of(3.0), UNSCORED], [of(4.0), of(5.0), MASKED]],
        [[(-2 / S,), (-1 / S,), (0.0,), (0.0,)], [(1 / S,), (2 / S,), (6 / S,)]],
    ),
    "turns count one by one": (
        [[of(1.0, 2.0)], [of(3.0), of(4.0, 5.0)]],
        [[(-2 / S, -1 / S)], [(0.0,), (1 / S, 2 / S)]],
    ),
    "tokens count one by one, and a rollout may have none": (
        [[replace(of(1.0, 2.0, 3.0), by_token=True)], [replace(of(4.0, 5.0), by_token=True), of()]],
        [[(-2 / S, -1 / S, 0.0)], [(1 / S, 2 / S), ()]],
    ),
    # mean 0 up to rounding: the group without spread keeps an exact 0
    "a group without spread": (
        [[of(0.1 + 0.2), of(-0.3)], [of(0.0), of(0.0)]],
        [[(1.2247449,), (-1.2247449,)], [(0.0,), (0.0,)]],
    ),
    "no spread in the batch": ([[of(0.7), of(0.7)], [of(0.7 + 1e-7)]], [[(0.0,)] * 2, [(0.0,)]]),
    "one rollout": ([[of(5.0)]], [[(0.0,)]]),
    "one rollout with a score": ([[of(5.0), UNSCORED]], [[(0.0,), (0.0,)]]),
    "no rollout with a score": ([[UNSCORED, UNSCORED]], [[(0.0,), (0.0,)]]),
    "no group": ([], []),
}


@pytest.mark.parametrize("case", TABLE)
def test_whiten_subtracts_the_mean_of_the_batch_and_divides_by_its_deviation(case: str) -> None:
    given, expected = TABLE[case]
    found = numbers([group(*credits) for credits in given])
    assert [[len(one) for one in each] for each in found] == [[len(o) for o in e] for e in expected]
    flat = [[x for each in rows for one in each for x in one] for rows in (found, expected)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-7)
    assert [x == 0 for x in flat[0]] == [x == 0 for x in flat[1]]


def test_the_order_of_groups_and_rollouts_changes_nothing() -> None:
    random = Random(0)
    values = [random.gauss(0, 1) for _ in range(24)]
    whole = {v: x for v, (x,) in zip(values, numbers([group(*map(of, values))])[0], strict=True)}
    for _ in range(5):
        random.shuffle(values)
        split = numbers([group(*map(of, values[i : i + 6])) for i in range(0, 24, 6)])
        found = dict(zip(values, (x for each in split for (x,) in each), strict=True))
        assert found == pytest.approx(whole, abs=1e-14)
    assert math.fsum(whole.values()) == pytest.approx(0, abs=1e-12)
    assert math.fsum(x * x for x in whole.values()) == pytest.approx(23)


def test_none_returns_the_same_credits() -> None:
    groups = [group(of(1.0), UNSCORED), group(MASKED)]
    assert [g.credits for g in apply_batch_credit(groups, none)] == [g.credits for g in groups]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda groups: [],
        lambda groups: [each.credits[:1] for each in groups],
        lambda groups: [[replace(c, advantages=(0.0, 0.0)) for c in g.credits] for g in groups],
    ],
    ids=["no groups", "one rollout of each", "two advantages"],
)
def test_a_batch_credit_of_another_shape_ends_the_run(wrong) -> None:
    with pytest.raises(RunFailed, match=r"from \[\[1, 1\], \[1\]\] to .*: return as many for each"):
        apply_batch_credit([group(of(1.0), of(2.0)), group(of(3.0))], wrong)


def played(advantage, rewards: list[dict[str, float]], weights: dict[str, float]) -> list[Group]:
    """Return groups of two rollouts with these named rewards, with the credits of an advantage."""
    made = []
    credit = GroupCredit(
        keep,
        build(chosen("reward", "default") | {"normalise_each": len(weights) > 1})(),
        advantage,
        lambda _: weights,
    )
    for i in range(0, len(rewards), 2):
        rollouts = tuple(
            Rollout((), [], sum(weights[n] * r for n, r in named.items()), named, StopReason.STOP,
                    turns=1, generation_time=0.0)
            for named in rewards[i : i + 2]
        )  # fmt: skip
        example = Example(i, "e", [])
        made.append(Group(i, example, 0, rollouts, credit(example, rollouts)))
    return made


def test_reinforce_plus_plus_subtracts_no_mean_of_the_group() -> None:
    rewards = [{"r": 1.0}, {"r": 0.0}, {"r": 1.0}, {"r": 1.0}]
    # mean 3/4, squares (1 + 9 + 1 + 1) / 16 over 3: deviation 1/2
    expected = [[(0.5,), (-1.5,)], [(0.5,), (0.5,)]]
    assert numbers(played(no_baseline, rewards, {"r": 1.0})) == expected


def test_lite_ppo_divides_the_distance_from_the_groups_mean_by_the_deviation_of_the_batch() -> None:
    rewards = [{"r": 4.0}, {"r": 0.0}, {"r": 1.0}, {"r": 0.0}, {"r": 1.0}, {"r": 1.0}]
    # distances 2, -2, 1/2, -1/2, 0, 0: squares 17/2 over 5
    s = math.sqrt(1.7)
    expected = [2 / s, -2 / s, 0.5 / s, -0.5 / s, 0.0, 0.0]
    found = [x for each in numbers(played(group_mean, rewards, {"r": 1.0})) for (x,) in each]
    assert found == pytest.approx(expected)


def test_gdpo_normalises_each_reward_in_its_group_then_their_sum_in_the_batch() -> None:
    """The third step of arXiv:2601.05242, with weights 1 and 2."""
    weights = {"right": 1.0, "short": 2.0}
    rewards = [
        {"right": 1.0, "short": 0.0},
        {"right": 0.0, "short": 10.0},
        {"right": 1.0, "short": 3.0},
        {"right": 0.0, "short": 3.0},
    ]
    z = math.sqrt(0.5)  # z-score of the better of two
    sums = [z - 2 * z, -z + 2 * z, z, -z]
    deviation = math.sqrt(4 * z * z / 3)
    found = numbers(played(lambda g: group_zscore(g, epsilon=0.0), rewards, weights))
    assert [x for each in found for (x,) in each] == pytest.approx([x / deviation for x in sums])
