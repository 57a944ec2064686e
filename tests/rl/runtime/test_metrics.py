"""metrics.jsonl survives kills and resumes, and contains only JSON; conditions on a metric."""

import json
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
