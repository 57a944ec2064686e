"""max_time: its spellings, and the time that is left for a checkpoint."""

from types import SimpleNamespace

import pytest

from rl.config.schema import seconds_of
from rl.model.shape import read_sizes
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.runtime.stop_request import StopRequest
from rl.supervisor import time_limit
from rl.supervisor.resolve import resolve
from rl.supervisor.supervise import _Launch
from rl.supervisor.time_limit import TimeLimit, seconds_to_save
from tests.support.composing import composed
from tests.support.tiny_policy import model_folder

HOUR = 3600


def test_a_duration_is_read_as_it_is_written():
    durations = {"3h30m": 3.5 * HOUR, "1d 2h": 26 * HOUR, "1.5h": 5400, "1h1m1s": 3661, "600": 600}
    for written, seconds in {**durations, 5400: 5400, 0.5: 0.5}.items():
        assert seconds_of(written) == seconds
    for written in ("", "m", "30m3h", "3 hours", "1:30", "-5m", "0", "nan"):
        with pytest.raises(ValueError, match="is not a duration"):
            seconds_of(written)


@pytest.mark.parametrize(
    ("steps", "checkpoints", "step", "checkpoint"),
    [
        ([90.0, 8.0, *[4.0] * 19], [40.0, *[1e-6] * 20], 8, 40),  # the first of 21 is left out
        ([4.0], [0.02], 4, 0.02),
        ([4.0, 4.0], [1e-6, 1e-6], 4, 30),  # the first checkpoint is assumed to take 30 s
    ],
)
def test_the_time_to_save_is_that_of_the_slowest(steps, checkpoints, step, checkpoint):
    pairs = zip(steps, checkpoints, strict=True)
    rows = [{"time/step": each, "time/checkpoint": saving} for each, saving in pairs]
    assert seconds_to_save(rows) == pytest.approx(1.25 * (step + checkpoint) + 5)


@pytest.mark.parametrize(
    ("max_time", "parameters", "latest"),  # the last second at which no end is requested
    [
        ("1h", 4_000_000_000, 4600 - 415),  # 64 GB take 320 s: 1.25 * (8 + 320) + 5 s
        ("10m", 4_000_000_000, 1600 - 202.5),  # at most a quarter of max_time: 150 s
        ("1h", 1_000_000, 4600 - 52.5),  # at least 30 s
    ],
)
def test_a_large_checkpoint_is_assumed_to_take_long(max_time, parameters, latest, tmp_path, clock):
    folder, stop = RunFolder(tmp_path), StopRequest()
    limit = TimeLimit(max_time, folder)
    limit.expect_checkpoint(parameters)
    MetricsFile(folder).append(0, {"time/step": 8.0, "time/checkpoint": 1e-6})
    for now, asked in ((latest - 1, False), (latest + 1, True)):
        clock.now = now
        limit.request_stop_if_due(stop)
        assert stop.asked == asked


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_only_a_run_that_trains_all_weights_expects_a_large_checkpoint(adapter, tmp_path):
    model, expected = model_folder(tmp_path / "model"), []
    run_folder = RunFolder(tmp_path / "model" / "config.json" / "r")
    limit = SimpleNamespace(expect_checkpoint=expected.append)
    resolved = resolve(composed("run_name=r", "model.warm_start=null", f"adapter={adapter}"))
    with pytest.raises(NotADirectoryError):  # so nothing starts
        _Launch(run_folder, None, None, limit, None).execute(resolved, model)
    assert expected == ([read_sizes(model).parameters] if adapter == "none" else [])


@pytest.fixture
def clock(monkeypatch):
    """A time that passes as the test says."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(time_limit.time, "time", lambda: Clock.now)
    return Clock


def test_the_end_is_requested_when_the_remaining_time_is_needed_to_save(tmp_path, clock):
    folder, stop = RunFolder(tmp_path), StopRequest()
    before = MetricsFile(folder)
    clock.now = 500.0
    before.append(0, {"time/step": 1e6})  # by the start before this one
    clock.now = 1000.0
    limit = TimeLimit("10m", folder)
    before.append(1, {"time/step": 8.0, "time/checkpoint": 12.0})  # 30 s with margins
    clock.now = 1569.0
    limit.request_stop_if_due(stop)
    assert (limit.is_over, stop.asked) == (False, False)
    assert limit._rows == [{"time/step": 8.0, "time/checkpoint": 12.0}]  # no other metric is kept
    clock.now = 1571.0
    limit.request_stop_if_due(stop)
    assert (limit.is_over, stop.asked, stop.number) == (True, True, None)


def test_without_a_finished_step_the_run_fails_when_the_time_is_over(tmp_path, clock):
    folder, stop = RunFolder(tmp_path), StopRequest()
    limit = TimeLimit(60, folder)
    clock.now = 1059.0
    limit.request_stop_if_due(stop)
    assert not stop.asked
    clock.now = 1061.0
    with pytest.raises(RunFailed, match="max_time=60 was over before the first step"):
        limit.request_stop_if_due(stop)
