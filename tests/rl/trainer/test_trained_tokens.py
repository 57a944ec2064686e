"""The rows of its micro-batches that a rank records."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from losses.aggregation import token_mean
from rl.rollouts.plan import plan_batch
from rl.rollouts.sampled_tokens import TokenRecord
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from rl.trainer.trained_tokens import StepRecord
from tests.support.forked_groups import forked_groups


def shares(groups, recorded, ranks, budget=40):
    sizes = {"ranks": ranks, "tokens_per_micro_batch": budget}
    planned = plan_batch(groups, token_mean, step=5, **sizes, metrics={})
    ids = TokenRecord(num_groups=None).ids(groups, recorded)
    return [replace(share, record_ids=ids) for share in planned]


def tokens_of(micro, **more):
    """Return token ids instead of computed values, so that a test can recognise each token."""
    flat = {"pi": micro.token_ids[micro.completion_mask], **more}
    return {name: torch.tensor(np.asarray(values)).double() for name, values in flat.items()}


def trained_rows(groups):
    """Return (id, number) of each row of these groups that trains."""
    found = set()
    for group in groups:
        played = zip(group.rollout_ids, group.rollouts, group.credits, strict=True)
        for id, rollout, credit in played:
            found |= {(id, number) for number in range(len(rollout.rows)) if credit.trains}
    return found


def record(folder, groups, recorded, ranks, more=lambda number, micro: {}):
    TokenRecord(num_groups=None).write(folder, 5, recorded)
    for rank, share in enumerate(shares(groups, recorded, ranks)):
        step = StepRecord(share)
        for number, micro in enumerate(share.micro_batches):
            step.observe(0, number, tokens_of(micro, **more(number, micro)))
        step.write(folder, rank)


def test_every_trained_token_is_joined_with_itself_under_several_ranks(tmp_path):
    groups, folder = forked_groups(num_groups=7), RunFolder(tmp_path)
    batch, rejected = groups[:6], groups[6:]
    micros = [micro for share in shares(batch, groups, 32) for micro in share.micro_batches]
    assert any((micro.rollout_ids < 0).any() for micro in micros)  # an empty one is no row
    record(folder, batch, groups, 32)
    rows, trained = read_rows(folder, 5), trained_rows(batch)
    assert {(row.id, row.row) for row in rows if row.trained} == trained
    assert any(number > 0 for _, number in trained)
    # One rollout is masked, a whole group was rejected: sampled, and never trained.
    untrained = {row.id for row in rows if not row.trained}
    assert untrained == {"000000.2", *rejected[0].rollout_ids}
    for row in rows:
        if row.trained:
            ids = np.where(row.columns["mask"], row.columns["token_ids"], np.nan)
            np.testing.assert_array_equal(row.columns["pi"], ids.astype(np.float32))


def test_a_metric_that_some_micro_batches_lack_is_nan_there(tmp_path):
    groups, folder = forked_groups(num_groups=4), RunFolder(tmp_path)

    def sometimes(number, micro):
        return {"metric_odd": np.ones(micro.completion_mask.sum())} if number else {}

    record(folder, groups, groups, 1, sometimes)
    columns = [row.columns for row in read_rows(folder, 5) if row.trained]
    values = np.concatenate([each["metric_odd"][each["mask"]] for each in columns])
    assert np.isnan(values).any()
    assert (values == 1).any()


@pytest.mark.parametrize(
    ("recorded", "loss", "grad", "of_candidates"),
    [(0, 0, 0, 0), (0, 0, np.inf, 0), (1, np.nan, 0, 0), (1, 0, 0, np.nan)],
)
def test_a_step_that_is_recorded_whole_has_every_row_of_its_last_update(
    recorded, loss, grad, of_candidates, tmp_path
):
    groups, folder = forked_groups(num_groups=4), RunFolder(tmp_path)
    (share,) = shares(groups, groups[:recorded], 1)
    step, everything = StepRecord(share), TokenRecord(num_groups=None)
    all_ids = everything.ids(groups, groups)
    for update in range(2):
        for number, micro in enumerate(share.micro_batches):
            rows = np.repeat(micro.rollout_ids, micro.completion_mask.sum(1))
            own = (rows == all_ids.index("000002.1")) & (np.arange(len(rows)) % 2 > 0)
            given = {"loss": loss, "grad": grad, "candidate_grad": of_candidates}
            more = {name: np.where(own, value, 0.0) for name, value in given.items()}
            step.observe(update, number, tokens_of(micro, **more))
    everything.write(folder, 5, groups)
    named = step.write_all(folder, 0, all_ids)
    assert named == (set() if loss == grad == of_candidates else {"000002.1"})
    rows = [row for row in read_rows(folder, 5) if row.trained]
    assert sum(row.update == 1 for row in rows) == len(trained_rows(groups))
    of_first = {row.id.split(".")[0] for row in rows if row.update == 0}
    assert of_first == {f"{group.index:06d}" for group in groups[:recorded]}
