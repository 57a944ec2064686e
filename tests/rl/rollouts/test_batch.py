"""Batch credits and the numbers of a batch, worked by hand."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from envs.episode import StopReason
from rl.records import Credit, Group, TrainingRow
from rl.rollouts.batch_credit import apply_batch_credit, whiten
from rl.rollouts.batch_metrics import batch_metrics
from rl.runtime.failure import RunFailed
from tests.support.rollouts import group, rollout, row


def credited(*credits: Credit) -> Group:
    return group([rollout(0.0)] * len(credits), credits)


def of(*advantages: float) -> Credit:
    return Credit(1.0, advantages)


def numbers(groups: list[Group]) -> list[list[tuple[float, ...]]]:
    whitened = apply_batch_credit(groups, whiten)
    return [[credit.advantages for credit in each.credits] for each in whitened]


UNSCORED = Credit(None, (0.0,), trains=False)
MASKED = Credit(3.0, (9.0,), trains=False)
S = math.sqrt(2.5)  # of 1, 2, 3, 4, 5: squares 4 + 1 + 0 + 1 + 4, over 4
TABLE = {
    # Neither is in mean and std. The rollout without a score keeps 0.
    "rollouts without a score, and masked": (
        [[of(1.0), of(2.0), of(3.0), UNSCORED], [of(4.0), of(5.0), MASKED]],
        [[(-2 / S,), (-1 / S,), (0.0,), (0.0,)], [(1 / S,), (2 / S,), (6 / S,)]],
    ),
    "turns and tokens count one by one, and a rollout may have none": (
        [[of(1.0, 2.0)], [of(3.0), replace(of(4.0, 5.0), by_token=True), of()]],
        [[(-2 / S, -1 / S)], [(0.0,), (1 / S, 2 / S), ()]],
    ),
    # mean 0 up to rounding: the group without spread keeps an exact 0
    "a group without spread": (
        [[of(0.1 + 0.2), of(-0.3)], [of(0.0), of(0.0)]],
        [[(1.2247449,), (-1.2247449,)], [(0.0,), (0.0,)]],
    ),
    "no spread in the batch": ([[of(0.7), of(0.7)], [of(0.7 + 1e-7)]], [[(0.0,)] * 2, [(0.0,)]]),
    "one rollout with a score": ([[of(5.0), UNSCORED]], [[(0.0,), (0.0,)]]),
    "no group": ([], []),
}


@pytest.mark.parametrize("case", TABLE)
def test_whiten_subtracts_the_mean_of_the_batch_and_divides_by_its_deviation(case: str) -> None:
    given, expected = TABLE[case]
    found = numbers([credited(*credits) for credits in given])
    assert [[len(one) for one in each] for each in found] == [[len(o) for o in e] for e in expected]
    flat = [[x for each in rows for one in each for x in one] for rows in (found, expected)]
    assert flat[0] == pytest.approx(flat[1], abs=1e-7)
    assert [x == 0 for x in flat[0]] == [x == 0 for x in flat[1]]


def test_the_order_of_groups_and_rollouts_changes_nothing() -> None:
    random = Random(0)
    values = [random.gauss(0, 1) for _ in range(24)]
    (whole,) = numbers([credited(*map(of, values))])
    whole = {v: x for v, (x,) in zip(values, whole, strict=True)}
    for _ in range(5):
        random.shuffle(values)
        split = numbers([credited(*map(of, values[i : i + 6])) for i in range(0, 24, 6)])
        found = dict(zip(values, (x for each in split for (x,) in each), strict=True))
        assert found == pytest.approx(whole, abs=1e-14)
    assert math.fsum(whole.values()) == pytest.approx(0, abs=1e-12)
    assert math.fsum(x * x for x in whole.values()) == pytest.approx(23)


def test_a_batch_credit_of_another_shape_ends_the_run() -> None:
    groups = [credited(of(1.0), of(2.0)), credited(of(3.0))]
    two = [[replace(credit, advantages=(0.0, 0.0)) for credit in g.credits] for g in groups]
    for wrong in ([], [each.credits[:1] for each in groups], two):
        with pytest.raises(RunFailed, match=r"from \[\[1, 1\], \[1\]\] to .*: return as many"):
            apply_batch_credit(groups, lambda _, wrong=wrong: wrong)


def penalised(*rollouts) -> Group:
    """Return a group whose shaped rewards are halved and whose truncated rollouts are masked."""
    pairs = [(r.reward and r.reward / 2, not r.stop_reason.truncated) for r in rollouts]
    return group(rollouts, [Credit(reward, (0.0,), trains) for reward, trains in pairs], version=3)


def sampled(*versions: int) -> TrainingRow:
    made = row(-1, *[0] * len(versions))
    return replace(made, token_versions=np.array([-1, *versions], np.int32))


ENDED = {"turns": 1, "generation_time": 2.0}
CUT_OFF = {"turns": 3, "generation_time": 4.0}
BATCH = [
    penalised(
        rollout(1.0, sampled(3, 3, 4), fields=ENDED, exact=1.0),
        rollout(
            *(0.0, sampled(2), sampled(3, 4)),
            **{"stop": StopReason.MAX_TOKENS, "fields": CUT_OFF, "exact": 0.0},
        ),
    ),
    penalised(
        rollout(None, lengths=(), stop=StopReason.ENV_ERROR, fields={"turns": 1, "error": "lost"}),
        rollout(0.5, sampled(4), exact=0.5),
    ),
]


def test_a_batch_in_numbers():
    metrics = batch_metrics(BATCH, step=4)
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics == pytest.approx(
        {
            "train/reward": 0.5,  # the unscorable rollout stays out
            "train/shaped_reward": 0.25,
            "train/tokens": 7,
            "reward/exact": 0.5,
            "rollout/untrained": 1 / 4,
            "rollout/mean_length": 7 / 4,
            "rollout/max_length": 3,
            "rollout/turns": 6 / 4,
            "rollout/generation_time": 6 / 4,
            "rollout/zero_spread": 0.0,  # of the groups in which two were scored
            **{f"rollout/{name}": 1 / 4 for name in ("truncated", "errors", "forks")},
            "rollout/retries": 0,
            **{"stop/stop": 2 / 4, "stop/max_tokens": 1 / 4, "stop/env_error": 1 / 4},
            "staleness/mean": (1 + 1 + 0 + 2 + 1 + 0 + 0) / 7,
            "staleness/max": 2,
            **{f"staleness/share_{s}": share / 7 for s, share in enumerate((3, 3, 1))},
        }
    )
