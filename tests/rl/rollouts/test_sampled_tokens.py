"""Which rollouts are recorded, and that their files speak of the same ones."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rl.records import RankBatch
from rl.rollouts.sampled_tokens import TokenRecord
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from rl.wire import unpack
from tests.rl.rollouts.test_service import asked, next_batch, service
from tests.support.forked_groups import forked_groups


def test_none_all_or_a_few_groups_are_chosen_and_not_the_oldest_every_time():
    groups = forked_groups(num_groups=6)
    rejected = [groups.pop()]
    assert TokenRecord(num_groups=0).choose(groups, rejected, 0) == []
    assert TokenRecord(num_groups=None).choose(groups, rejected, 0) == [*groups, *rejected]
    few = TokenRecord(num_groups=2)
    drawn = [tuple(g.index for g in few.choose(groups, rejected, step)) for step in range(40)]
    assert {len(set(each)) for each in drawn} == {2}
    assert {index for each in drawn for index in each} == {0, 1, 2, 3, 4}
    assert drawn == [tuple(g.index for g in few.choose(groups, [], step)) for step in range(40)]
    assert len(TokenRecord(num_groups=99).choose(groups, rejected, 0)) == 5


def test_the_trainer_is_told_which_rollouts_of_the_batch_those_are():
    groups = forked_groups(num_groups=2)
    record = TokenRecord(num_groups=None)
    assert record.ids(groups, []) == ()
    # A batch of which nothing is recorded, for all that is belongs to a rejected group.
    assert record.ids(groups[:1], groups[1:]) == ("",) * 3
    assert record.ids(groups, groups[1:]) == ("", "", "", "000001.0", "000001.1", "000001.2")


async def test_both_files_of_the_rollouts_process_name_the_same_rollouts(tmp_path):
    groups = forked_groups(num_groups=3)
    served = service(tmp_path, groups[:2], record="all")
    served._dispatcher.on_rejected(groups[2])
    answers = await asked(served, *next_batch(4, ranks=(0, 1)))
    batches = [unpack(answer.value, RankBatch) for answer in answers]
    written = RunFolder(tmp_path).rollouts_of(4).read_text().splitlines()
    lines = [json.loads(line) for line in written]
    assert [line["id"] for line in lines] == [f"00000{g}.{i}" for g in range(3) for i in range(3)]
    rows = read_rows(RunFolder(tmp_path), 4)
    ids = [(line["id"], row) for line in lines for row in range(line["num_rows"])]
    assert [(row.id, row.row) for row in rows] == ids
    played = [row for g in groups for rollout in g.rollouts for row in rollout.rows]
    for row, sequence in zip(rows, played, strict=True):
        names = {"token_ids": "token_ids", "mask": "completion_mask"}
        names |= {"version": "token_versions", "turns": "turns"}
        for name, attribute in names.items():
            np.testing.assert_array_equal(row.columns[name], getattr(sequence, attribute))
        mu = np.where(sequence.completion_mask, sequence.rollout_logprobs, np.nan)
        np.testing.assert_array_equal(row.columns["mu"], mu)
    # Both ranks know all ids, for either may have any row.
    assert {batch.record_ids for batch in batches} == {tuple(x["id"] for x in lines[:6])}


@pytest.mark.parametrize(("record", "recorded"), [("none", 0), ("sample", 2)])
async def test_who_records_nothing_pays_nothing_and_a_sample_is_of_the_batch(
    tmp_path, record, recorded
):
    groups = forked_groups(num_groups=4)
    served = service(tmp_path, groups[:3], record=record)
    served._dispatcher.on_rejected(groups[3])
    (answer,) = await asked(served, *next_batch())
    ids = unpack(answer.value, RankBatch).record_ids
    assert len([id for id in ids if id]) == 3 * recorded
    assert RunFolder(tmp_path).tokens.exists() == bool(recorded)
    assert {row.id for row in read_rows(RunFolder(tmp_path), 0)} == set(filter(None, ids))


async def test_a_disk_that_takes_no_tokens_does_not_hold_up_the_batch(tmp_path, caplog):
    (tmp_path / "tokens").write_text("no folder")
    served = service(tmp_path, forked_groups(num_groups=1), record="all")
    (answer,) = await asked(served, *next_batch())
    assert unpack(answer.value, RankBatch).micro_batches
    assert "tokens are not recorded" in caplog.text


async def test_text_that_no_policy_sampled_has_no_version_and_no_mu(tmp_path):
    (group,) = forked_groups(num_groups=1)
    unsampled = [
        replace(one, rows=tuple(replace(r, token_versions=0 * r.turns - 1) for r in one.rows))
        for one in group.rollouts
    ]
    served = service(tmp_path, [replace(group, rollouts=tuple(unsampled))], record="all")
    await asked(served, *next_batch(7))
    lines = RunFolder(tmp_path).rollouts_of(7).read_text().splitlines()
    assert [json.loads(line)["versions"] for line in lines] == [[]] * 3
    for row in read_rows(RunFolder(tmp_path), 7):
        assert row.columns["mask"].any()
        assert np.isnan(row.columns["mu"]).all()
