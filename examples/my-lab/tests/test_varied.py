"""Test which groups the buffer rejects, and the reasons that it counts."""

import numpy as np
import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant
from my_lab.varied import VariedBuffer
from rl.records import Credit, Group, Rollout, TrainingRow

ROW = TrainingRow(  # one sampled token, because a group without tokens is rejected
    token_ids=np.array([5], np.int32),
    completion_mask=np.array([True]),
    rollout_logprobs=np.array([-1.0], np.float32),
    token_versions=np.array([0], np.int32),
    turns=np.array([0], np.int32),
)


def group(*answers: str, reward: float | None = 0.0) -> Group:
    """Return a finished group whose rollouts have these answers."""
    rollouts = tuple(
        Rollout(
            (ROW,), [assistant(answer)], reward, {}, StopReason.STOP, turns=1, generation_time=0.0
        )
        for answer in answers
    )
    credit = Credit(reward=reward, advantages=(0.0,))
    return Group(0, Example(0, "lockers", []), 0, rollouts, (credit,) * len(answers))


@pytest.mark.parametrize(
    ("finished", "why"),
    [
        (group("kam", "kam", "kam"), "unanimous"),
        (group("kam", "kam", "kan"), ""),
        (group("a", "b", "c"), ""),  # equal rewards are accepted
        (group("kam", "kan", reward=None), "unscorable"),  # FifoBuffer's reason comes first
    ],
)
def test_a_unanimous_group_is_replaced_and_counted(finished: Group, why: str) -> None:
    buffer = VariedBuffer(min_answers=2)
    assert buffer.add(finished) == (not why)
    assert buffer.rejected == ({why: 1} if why else {})


def test_more_answers_can_be_asked_for() -> None:
    assert VariedBuffer(min_answers=3).why_useless(group("kam", "kan", "kam")) == "unanimous"
