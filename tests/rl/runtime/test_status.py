"""Status files: what is written, when, and how damaged files are read."""

import time

import pytest

from rl.runtime.folder import RunFolder
from rl.runtime.status import PROGRESS_INTERVAL_S, Status, Stopwatch, read_statuses


@pytest.fixture
def status(tmp_path):
    return Status(RunFolder(tmp_path), "trainer")


@pytest.fixture
def on_disk(tmp_path):
    """Return a function that reads the status of the trainer."""
    return lambda: read_statuses(RunFolder(tmp_path))["trainer"]


def test_each_phase_is_written_at_once_with_its_start(on_disk, status):
    for step in range(20):
        before = time.time()
        status.set(f"training step {step}")
        assert on_disk().doing == f"training step {step}"
        assert before <= on_disk().since <= time.time()


def test_progress_is_written_at_most_five_times_a_second_and_a_repeat_never(status, monkeypatch):
    writes, write = [], status._write
    monkeypatch.setattr(status, "_write", lambda what: (writes.append(what), write(what)))
    began = time.monotonic()
    for number in range(2000):
        status.set(f"sampling: {number // 2} of 1000")
    assert 1 <= len(writes) <= 2 + (time.monotonic() - began) / PROGRESS_INTERVAL_S


def test_progress_that_came_too_soon_is_written_when_it_is_repeated(on_disk, status):
    status.set("sampling: 1 of 2")
    status.set("sampling: 2 of 2")
    assert on_disk().doing == "sampling: 1 of 2"
    since = on_disk().since
    time.sleep(PROGRESS_INTERVAL_S + 0.05)
    status.set("sampling: 2 of 2")
    assert on_disk().doing == "sampling: 2 of 2"
    assert on_disk().since == since  # progress does not restart the clock of its phase


def test_a_stopwatch_shows_a_phase_and_keeps_its_seconds(on_disk, status):
    watch = Stopwatch(status)
    with watch.phase("push", "pushing version 3"):
        assert on_disk().doing == "pushing version 3"
        time.sleep(0.01)
    assert watch.times.keys() == {"time/push"}
    assert 0.01 <= watch.times["time/push"] < 60


def test_damaged_files_are_left_out_and_an_unwritable_folder_is_ignored(tmp_path):
    Status(RunFolder(tmp_path), "rollouts").set("sampling")
    for name, content in (("torn", '{"doing": "samp'), ("list", "[1]"), ("poor", '{"doing": "x"}')):
        (tmp_path / "status" / f"{name}.json").write_text(content)
    assert list(read_statuses(RunFolder(tmp_path))) == ["rollouts"]
    assert read_statuses(RunFolder(tmp_path / "nowhere")) == {}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "status").write_text("a file where the folder should be")
    Status(RunFolder(tmp_path / "other"), "trainer").set("loading the model")
