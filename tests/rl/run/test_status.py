"""Statuses on disk: what is written, when, and what the reader makes of damaged files."""

import time

import pytest

from rl.report.panel import duration
from rl.run.folder import RunFolder
from rl.run.status import PROGRESS_INTERVAL_S, Status, read_statuses


def on_disk(tmp_path):
    return read_statuses(RunFolder(tmp_path))["trainer"]


def test_what_was_said_is_what_is_read(tmp_path):
    before = time.time()
    Status(RunFolder(tmp_path), "trainer.rank0").set("loading the model")
    status = read_statuses(RunFolder(tmp_path))["trainer.rank0"]
    assert status.doing == "loading the model"
    assert before <= status.since <= time.time()


def test_progress_does_not_restart_the_clock_of_its_phase(tmp_path):
    status = Status(RunFolder(tmp_path), "trainer")
    status.set("waiting for batch 3: 1 of 64 rollouts")
    since = on_disk(tmp_path).since
    time.sleep(PROGRESS_INTERVAL_S + 0.05)
    status.set("waiting for batch 3: 2 of 64 rollouts")
    assert on_disk(tmp_path).doing == "waiting for batch 3: 2 of 64 rollouts"
    assert on_disk(tmp_path).since == since


def test_progress_is_written_at_most_five_times_a_second_and_a_repeat_never(tmp_path, monkeypatch):
    status, writes = Status(RunFolder(tmp_path), "trainer"), []
    write = status._write
    monkeypatch.setattr(status, "_write", lambda what: (writes.append(what), write(what)))
    began = time.monotonic()
    for number in range(2000):
        status.set(f"sampling: {number // 2} of 1000")
    assert 1 <= len(writes) <= 2 + (time.monotonic() - began) / PROGRESS_INTERVAL_S


def test_another_phase_is_written_at_once(tmp_path):
    status = Status(RunFolder(tmp_path), "trainer")
    for step in range(20):
        status.set(f"training step {step}")
        assert on_disk(tmp_path).doing == f"training step {step}"


def test_progress_that_came_too_soon_is_written_when_it_is_repeated(tmp_path):
    status = Status(RunFolder(tmp_path), "trainer")
    status.set("sampling: 1 of 2")
    status.set("sampling: 2 of 2")
    assert on_disk(tmp_path).doing == "sampling: 1 of 2"
    time.sleep(PROGRESS_INTERVAL_S + 0.05)
    status.set("sampling: 2 of 2")
    assert on_disk(tmp_path).doing == "sampling: 2 of 2"


def test_a_block_returns_to_what_was_said_before_and_to_its_clock(tmp_path):
    status = Status(RunFolder(tmp_path), "trainer")
    status.set("training step 3")
    before = on_disk(tmp_path)
    with status.doing("writing a checkpoint"):
        assert on_disk(tmp_path).doing == "writing a checkpoint"
    assert on_disk(tmp_path) == before


def test_a_block_that_raises_leaves_its_text_behind(tmp_path):
    status = Status(RunFolder(tmp_path), "trainer")
    status.set("training step 3")
    with pytest.raises(RuntimeError), status.doing("pushing version 4"):
        raise RuntimeError
    assert on_disk(tmp_path).doing == "pushing version 4"


def test_damaged_and_foreign_files_are_left_out(tmp_path):
    Status(RunFolder(tmp_path), "rollouts").set("sampling")
    (tmp_path / "status" / "torn.json").write_text('{"doing": "samp')
    (tmp_path / "status" / "list.json").write_text("[1]")
    (tmp_path / "status" / "poor.json").write_text('{"doing": "x"}')
    assert list(read_statuses(RunFolder(tmp_path))) == ["rollouts"]
    assert read_statuses(RunFolder(tmp_path / "nowhere")) == {}


def test_a_disk_that_takes_no_status_does_not_stop_the_run(tmp_path):
    (tmp_path / "status").write_text("a file where the folder should be")
    Status(RunFolder(tmp_path), "trainer").set("loading the model")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 m 00 s"), (125, "2 m 05 s"), (3840, "1 h 04 m"), (-1, "0 s")],
)
def test_lengths_of_time_read_naturally(seconds, text):
    assert duration(seconds) == text
