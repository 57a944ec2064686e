"""What counts in a batch: tokens of the very first version, and rollouts that train alone."""

import numpy as np
import pytest

from envs.episode import Example, StopReason
from losses.aggregation import sequence_mean
from rl.records import Credit, Group, Rollout, Sequence
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.plan import weigh


def group(*trains: bool) -> Group:
    """Rollouts of two tokens, of version 0 and 1."""
    versions = np.array([-1, 0, 1], np.int32)
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    row = Sequence(ids, versions >= 0, logprobs, versions, versions.clip(max=0))
    rollout = Rollout((row,), [], 1.0, {}, StopReason.STOP, 1, 0.0)
    credits = tuple(Credit(1.0, (float(i),), one) for i, one in enumerate(trains))
    return Group(0, Example(0, "e", []), 0, (rollout,) * len(trains), credits)


def test_tokens_of_version_0_have_a_staleness_like_any_other():
    metrics = batch_metrics([group(True)], step=2)
    assert metrics["staleness/max"] == 2
    assert metrics["staleness/mean"] == pytest.approx(1.5)


def test_a_rollout_that_does_not_train_has_no_row_and_no_weight():
    rows = weigh([group(True, False, True)], sequence_mean)
    assert [(row.rollout_id, row.advantages) for row in rows] == [(0, 0.0), (2, 2.0)]
    assert [row.token_weights for row in rows] == pytest.approx([1 / 4, 1 / 4])
