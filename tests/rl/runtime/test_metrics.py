"""metrics.jsonl survives kills and resumes; conditions on a metric; the record of tokens."""

import json
import logging
import math

import numpy as np
import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import (
    MetricsFile,
    MetricsTail,
    num_steps_done,
    read_metrics,
    stage_seconds,
    steps_done,
    total_seconds,
    training_reward,
)
from rl.runtime.stop_when import StopWhen, is_fulfilled
from rl.runtime.token_files import Lines, read_rows, write_lines


def steps(tmp_path):
    return [row["step"] for row in read_metrics(RunFolder(tmp_path))]


@pytest.fixture
def ten_steps(tmp_path):
    file = MetricsFile(RunFolder(tmp_path))
    for step in range(10):
        file.append(step, {"train/reward": step / 10})
    return tmp_path


def test_a_line_is_on_disk_at_once_and_contains_only_numbers_that_the_reader_takes(tmp_path):
    odd = {"a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": None, "e": True}
    large = {"f": 1e101, "g": -1e300, "h": 1e100}
    MetricsFile(RunFolder(tmp_path)).append(0, {**odd, **large})
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert [line[name] for name in "abcde"] == [None, None, 0.5, None, 1.0]
    (row,) = read_metrics(RunFolder(tmp_path))
    assert [row[name] for name in ("step", *"cfgh")] == [0, 0.5, None, None, 1e100]
    assert row["time"] > 1e9


def test_a_resume_warns_of_damaged_lines_except_an_incomplete_last_one(ten_steps, caplog):
    path = ten_steps / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 3', '{"step: 3'))
    with path.open("ab") as file:
        file.write(b'[1]\n\n{"step": "x"}\n\xff\xfe\n{"step": 10, "a": "text"}\n{"step": 10, "tr')
    assert steps(ten_steps) == [0, 1, 2, *range(4, 10)]
    file = MetricsFile(RunFolder(ten_steps))
    file.truncate_after(99)
    numbers = [int(message.rpartition(" ")[2]) for message in caplog.messages]
    assert numbers == [4, *range(11, 16)]
    path.write_text(path.read_text().rstrip())  # an editor may remove the last newline
    file.truncate_after(99)
    file.append(10, {})
    assert steps(ten_steps) == [0, 1, 2, *range(4, 11)]


def test_a_resume_moves_the_later_lines_and_appends_to_the_others(ten_steps):
    file = MetricsFile(RunFolder(ten_steps))
    file.truncate_after(4)
    assert steps(ten_steps) == [0, 1, 2, 3, 4]
    file.append(5, {})
    file.truncate_after(-1)
    assert steps(ten_steps) == []
    lines = (ten_steps / "metrics.dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5]


def test_a_tail_reads_each_complete_line_once_and_restarts_after_a_truncation(ten_steps):
    assert MetricsTail(RunFolder(ten_steps / "nowhere")).read() == []
    tail = MetricsTail(RunFolder(ten_steps))
    assert len(tail.read()) == 10
    assert tail.read() == []
    with (ten_steps / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10')
        file.flush()
        assert tail.read() == []
        file.write("}\n")
    assert tail.read() == [{"step": 10}]
    MetricsFile(RunFolder(ten_steps)).truncate_after(2)
    assert [row["step"] for row in tail.read()] == [0, 1, 2]


@pytest.mark.parametrize("width", [10, 1 << 16])
def test_the_number_of_steps_needs_only_the_end_of_the_file(tmp_path, width):
    folder = RunFolder(tmp_path)
    assert num_steps_done(folder) == 0
    file = MetricsFile(folder)
    for step in range(1000):
        file.append(step, {"x" * width: 1.0} if step == 999 else {"x" * 100: 1.0})
    assert num_steps_done(folder) == 1000
    assert 0 < len(MetricsTail(folder).read(1 << 11)) < 20 or width > 1 << 11
    with folder.metrics.open("a") as end:
        end.write('{"step": 1000')
    assert num_steps_done(folder) == 1000


def test_the_training_reward_is_over_the_last_ten_steps_and_times_are_over_all():
    assert training_reward([float(step) for step in range(14)]) == 8.5
    assert training_reward([]) is None
    rows = [
        {"step": 0, "time/wait": 1.0, "time/update": 2.0, "time/step": 3.5},
        {"step": 1, "time/wait": 1.0, "time/checkpoint": 4.0, "time/step": 5.5},
    ]
    assert stage_seconds(rows) == {"checkpoint": 2.0, "update": 1.0, "wait": 1.0}
    assert total_seconds(rows) == 9.0
    assert total_seconds([]) == 0.0
    # Without time/step, the means of the stages (1 and 2) count for each of the two steps.
    assert total_seconds([{"time/wait": 1.0}, {"time/wait": 1.0, "time/update": 4.0}]) == 6.0
    assert steps_done([{"step": 3, "time": 1.0}]) == 4  # a step without metrics
    assert steps_done([{"step": 3, "time": 1.0, "eval/reward": 0.5}]) == 3  # no step


ROW = {"step": 3, "errors": 0.0, "eval/reward": 0.9, "eval/pass@1": None, "train/loss": math.nan}
HOLD = ("eval/reward > 0.89", " eval/reward >= 9e-1 ", "eval/reward < +0.91", "eval/reward <= 0.9")
DO_NOT_HOLD = (
    *("eval/reward>0.9", "eval/reward <= -0.9", "eval/reward < 0.9"),
    *("eval/pass@1 < 1", "train/loss < 1", "eval/pass@8 < 1"),  # null, NaN, and not in this line
)


def test_a_condition_compares_one_metric_with_a_number():
    for condition in (*HOLD, *DO_NOT_HOLD):
        assert StopWhen.of(condition).holds(ROW) == (condition in HOLD), condition
        assert is_fulfilled(condition, [{"step": 2}, ROW]) == (condition in HOLD)
        assert not is_fulfilled(condition, [])
    for text in ("0.9 <", "eval/reward", "a == 1", "a > b > 1", "a > x", ""):
        with pytest.raises(ValueError, match=r"not a condition: write a metric of metrics\.jsonl"):
            StopWhen.of(text)
        assert not is_fulfilled(text, [ROW])
    assert not is_fulfilled(None, [ROW])


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
