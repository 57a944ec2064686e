"""What becomes of rollouts that were cut off, worked by hand: one row a treatment."""

import pytest

from envs.episode import StopReason
from rl.records import Rollout
from rl.rollouts import truncation
from rl.rollouts.truncation import Standing

CUT = (StopReason.MAX_TOKENS, StopReason.CONTEXT)
WHOLE = tuple(reason for reason in StopReason if reason not in CUT)


def rollout(reward: float | None, reason: StopReason) -> Rollout:
    return Rollout((), [], reward, {}, reason, 1, 0.0)


@pytest.mark.parametrize("reason", CUT)
@pytest.mark.parametrize(
    ("treatment", "cut_off", "unscored"),
    [
        (truncation.keep, Standing(0.7), Standing(None)),
        (truncation.mask, Standing(0.7, trains=False), Standing(None, trains=False)),
        (truncation.zero_reward, Standing(0.0), Standing(None)),
        (truncation.mask_zero, Standing(0.0, trains=False), Standing(None, trains=False)),
        (truncation.drop, Standing(None, trains=False), Standing(None, trains=False)),
    ],
)
def test_what_was_cut_off_counts_as_its_treatment_says(treatment, cut_off, unscored, reason):
    assert treatment(rollout(0.7, reason)) == cut_off
    assert treatment(rollout(None, reason)) == unscored


@pytest.mark.parametrize("reason", WHOLE)
@pytest.mark.parametrize("name", ["keep", "mask", "zero_reward", "mask_zero", "drop"])
def test_what_ended_otherwise_is_left_alone(name, reason):
    assert getattr(truncation, name)(rollout(0.7, reason)) == Standing(0.7)


def test_a_mark_names_treatments_that_there_are():
    for mark in (truncation.NEUTRAL, truncation.LOWERS_REWARDS, truncation.CHANGES_REWARDS):
        assert all(callable(getattr(truncation, name)) for name in mark)
