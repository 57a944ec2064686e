"""The record of tokens: whole files, joined by rollout and row."""

import logging

import numpy as np
import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, read_rows, write_lines

MASK = np.array([False, True, True, False, True])


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def write_sampled(folder, *keys):
    """Write rows of five tokens, three of them sampled."""
    count = len(keys)
    columns = {
        "token_ids": np.arange(5 * count, dtype=np.int32),
        "mask": np.tile(MASK, count),
        "mu": np.tile(np.where(MASK, -0.5, np.nan), count).astype(np.float32),
        "version": np.tile(np.where(MASK, 3, -1), count).astype(np.int32),
        "turns": np.tile(np.where(MASK, 0, -1), count).astype(np.int32),
    }
    ids, rows = zip(*keys, strict=True)
    path = folder.tokens_of(7, "rollouts")
    write_lines(path, Lines(ids, rows, [5] * count, columns))
    return path.exists()


def write_trained(folder, rank, key, length=3, **columns):
    flat = {name: np.array(values, np.float32) for name, values in columns.items()}
    lines = Lines([key[0]], [key[1]], [length], flat)
    write_lines(folder.tokens_of(7, f"trainer.rank{rank}"), lines)


def test_rows_of_all_ranks_are_joined_by_rollout_and_row(folder):
    assert read_rows(folder, 7) == []  # no file
    write_sampled(folder, ("000001.0", 0), ("000001.0", 1), ("000002.0", 0))
    write_trained(folder, 1, ("000001.0", 0), grad=[7, 8, 9], ref=[0, 0, 0])
    write_trained(folder, 0, ("000001.0", 1), grad=[1, 2, 3])
    first, second, third = read_rows(folder, 7)
    assert (first.id, first.row, first.update) == ("000001.0", 0, 0)  # a file without updates
    assert (second.id, second.row) == ("000001.0", 1)
    assert (third.id, third.row) == ("000002.0", 0)
    assert [bool(row.trained) for row in (first, second, third)] == [True, True, False]
    np.testing.assert_array_equal(first.columns["grad"], [np.nan, 7, 8, np.nan, 9])
    np.testing.assert_array_equal(second.columns["grad"], [np.nan, 1, 2, np.nan, 3])
    np.testing.assert_array_equal(second.columns["token_ids"], [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(second.columns["mu"], [np.nan, -0.5, -0.5, np.nan, -0.5])
    assert "ref" in first.columns  # of this rank only
    assert second.columns.keys() | {"grad"} == third.columns.keys() | {"grad"}
    assert [r.columns["mask"].dtype for r in (first, third)] == [np.bool_] * 2
    assert [row.id for row in read_rows(folder, 7, "000002.0")] == ["000002.0"]
    assert read_rows(folder, 7, "000003.0") == []


def test_a_row_has_an_entry_for_each_update_of_its_batch(folder):
    write_sampled(folder, ("000001.0", 0), ("000002.0", 0))
    flat = {"grad": np.arange(6, dtype=np.float32)}
    lines = Lines(["000002.0"] * 2, [0, 0], [3, 3], flat, updates=[0, 1])
    write_lines(folder.tokens_of(7, "trainer.rank0"), lines)
    rows = read_rows(folder, 7)
    assert [row.id for row in rows] == ["000001.0", "000002.0", "000002.0"]
    assert [(row.update, bool(row.trained)) for row in rows] == [(0, False), (0, True), (1, True)]
    np.testing.assert_array_equal(rows[2].columns["grad"], [np.nan, 3, 4, np.nan, 5])


def test_files_that_are_damaged_or_do_not_belong_together_are_refused_by_name(folder):
    write_sampled(folder, ("000001.0", 0))
    write_trained(folder, 0, ("000001.0", 0), grad=[1, 2], length=2)
    with pytest.raises(ValueError, match=r"^\S*rank0\.parquet has 2 .* different runs, so delete"):
        read_rows(folder, 7)
    folder.tokens_of(7, "rollouts").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"^\S*rollouts\.parquet is damaged .*: delete it$"):
        read_rows(folder, 7)


def test_a_full_disk_is_one_warning_and_leaves_no_incomplete_file(folder, caplog):
    path = folder.tokens_of(7, "rollouts")
    path.parent.mkdir()
    # The temporary file is a link to a device that is always full.
    path.with_name(f".{path.name}.incomplete").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        assert not write_sampled(folder, ("000001.0", 0))
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "No space left" in warning
    assert "record=none" in warning
    assert list(path.parent.iterdir()) == []
    assert write_sampled(folder, ("000001.0", 0))  # after space was freed
