"""The lines that a sweep prints about its jobs."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.sweeps import overview
from rl.runtime.folder import RunFolder
from rl.runtime.sweep_folder import DONE, FAILED, RUNNING, WAITING, SweepFolder, identity, labels
from rl.runtime.text import relative_path
from tests.support.golden import golden
from tests.support.outcomes import without

NOW = 10_000.0


def set_state(sweep, state, *overrides, error=None):
    number, record = sweep.claim(["max_steps=20", *overrides])
    record.state, record.error = state, error
    if state != WAITING:
        record.folder, record.started = str(sweep.path / f"run-{number}"), NOW - 100.0
    if state in (DONE, FAILED):
        record.ended, record.result = NOW - 40.0, 0.45
    sweep.write(number, record)


@pytest.fixture
def sweep(tmp_path):
    folder = SweepFolder(tmp_path / "x")
    folder.path.mkdir()
    slots = [{"cores": [0, 1], "gpus": ["3"]}] * 2
    folder.write_info({"slots": slots, "question": "Why?", "started": NOW - 100.0})
    set_state(folder, DONE, "loss=a", "seed=0")
    set_state(folder, RUNNING, "loss=a", "seed=1")
    set_state(folder, FAILED, "loss=b", "seed=0", error="vLLM ended")
    set_state(folder, WAITING, "loss=b", "seed=1")
    return folder


def test_a_line_names_a_job_its_state_and_the_progress_of_all(sweep):
    jobs = overview.read_jobs(sweep)
    # A job took 60 s, two are left, and two run at once.
    progress = "1 done, 1 running, 1 waiting, 1 failed, about 1 m 00 s left"
    assert jobs.line_of(0) == f"done job 1 of 4: loss=a seed=0, training reward 0.450; {progress}"
    assert jobs.line_of(1) == f"running job 2 of 4: loss=a seed=1; {progress}"
    log = sweep.log_of(2)
    failed = f"failed job 3 of 4: loss=b seed=0, vLLM ended ({relative_path(log)}); {progress}"
    assert jobs.line_of(2, log) == failed


@pytest.mark.parametrize(
    ("num_slots", "max_steps", "jobs"),
    # With two slots, the running job ends before the waiting job.
    [(1, 100, 1.4), (2, 100, 1), (1, 60, 1), (1, 50, 1), (1, None, 2)],
)
def test_a_running_job_counts_by_the_steps_that_are_left(num_slots, max_steps, jobs, sweep):
    record = sweep.records()[1]
    record.max_steps = max_steps
    sweep.write(1, record)
    sweep.write_info(sweep.read_info() | {"slots": [{}] * num_slots})
    Path(record.folder).mkdir()
    RunFolder(Path(record.folder)).metrics.write_text('{"step": 59}\n')
    assert overview.read_jobs(sweep).seconds_left == pytest.approx(60 * jobs)


def test_changes_are_printed_once_and_the_last_ones_at_the_end(sweep, capsys, monkeypatch):
    monkeypatch.setattr("lab.sweeps.overview._TICK_S", 0.01)
    before = threading.active_count()
    with overview.printing_changes(sweep):
        set_state(sweep, RUNNING, "loss=b", "seed=1")
        time.sleep(0.2)
        set_state(sweep, DONE, "loss=b", "seed=1")
    assert threading.active_count() == before
    lines = [line.split()[1:6] for line in capsys.readouterr().out.splitlines()]
    assert lines == [[state, "job", "4", "of", "4:"] for state in ("running", "done")]


def test_the_progress_is_printed_every_minute(sweep, capsys, monkeypatch):
    now = [0.0]

    class End:
        def wait(self, _):
            now[0] += 25.0
            return now[0] == 200.0

    clock = SimpleNamespace(monotonic=lambda: now[0], strftime=lambda _: f"{now[0]:g}")
    monkeypatch.setattr("lab.sweeps.overview.time", clock)
    states = {number: record.state for number, record in overview.read_jobs(sweep).records.items()}
    overview._print_changes(sweep, states, End())
    progress = overview.read_jobs(sweep).progress()
    assert capsys.readouterr().out.splitlines() == [f"75 {progress}", f"150 {progress}"]


def test_a_record_that_cannot_be_read_is_left_out(sweep):
    (sweep.jobs / "00001.json").write_text('{"overrides"')
    (sweep.jobs / "00002.json").write_text("[]")
    assert list(sweep.records()) == [0, 3]
    assert sweep.claim(["loss=new"])[0] == 4
    sweep.write(5, sweep.records()[0])  # by another process
    assert sweep.claim(sweep.records()[5].overrides)[0] == 0


def test_a_job_is_identified_without_the_folder_of_its_run():
    one = ["seed=1", "loss=a", "run_name=x", "+resume=true", "accept_changed_code=true"]
    assert identity(one) == identity(["loss=a", "seed=1"]) != identity(["loss=a", "seed=2"])
    assert labels([["a=1", "b=1"], ["a=1", "b=2"]]) == ["b=1", "b=2"]
    assert labels([["a=1"]]) == ["a=1"]
    assert labels([]) == []


def test_the_lines_about_jobs_in_every_state(tmp_path, monkeypatch, capsys):
    """start_message, progress, the line of each job, and the last lines."""
    (tmp_path / "sweep").mkdir()
    sweep = SweepFolder(tmp_path / "sweep")
    monkeypatch.chdir(tmp_path)
    states = {
        "done": (1.0, 31.0, 0.25, None),
        "done too": (10.0, 100.0, None, None),
        "failed": (0.0, 5.0, None, "vLLM ended"),
        "waiting, stopped before": (0.0, 50.0, None, "interrupted"),
        "waiting, stopped now": (150.0, 170.0, None, "max_time"),
        "running": (150.0, None, None, "did not end"),
        "waiting": (None, None, None, "not started"),
    }
    for name, times in states.items():
        number, record = sweep.claim(["max_steps=9", f"loss={name}", "seed=0"])
        record.state = name.replace(",", "").split()[0]
        record.started, record.ended, record.result, record.error = times
        if "stopped" in name:
            record.folder = str(tmp_path / name)
            (tmp_path / name).mkdir()
            RunFolder(tmp_path / name).metrics.write_text('{"step": 0}\n')
        sweep.write(number, record)
    slots, found = [{"cores": [0, 1, 2], "gpus": ["3"]}] * 2, {}
    for info in ({"question": "Why?", "slots": slots, "started": 120.0},
                 {"slots": [], "jobs": [0, 2, 3], "started": 0.0}):  # fmt: skip
        sweep.write_info(info)
        jobs = overview.read_jobs(sweep)
        lines = [jobs.line_of(number, sweep.log_of(number)) for number in jobs.records]
        overview.print_end(sweep, "python train.py")
        start = overview.start_message(sweep, "python train.py").splitlines()
        found[f"{len(lines)} jobs"] = [start, lines, jobs.seconds_left, capsys.readouterr().out]
    golden("sweeps/overview", without(tmp_path, found))
