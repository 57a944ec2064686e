"""The screen of jobs that run at the same time, on a terminal and in a log file."""

import io
import json
import time

import pytest
from rich.console import Console

from lab.sweeps.overview import what_is_left, what_will_be_done
from lab.sweeps.screen import SweepScreen
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.runtime.status import Status
from rl.runtime.sweep_folder import DONE, FAILED, RUNNING, WAITING, SweepFolder, identity, labels
from rl.runtime.text import relative_path

NOW = 10_000.0
STEP_S = 6.0


def add_job(sweep, state, steps, *overrides, started=NOW - 100.0, error=None):
    number, record = sweep.claim(["max_steps=20", *overrides])
    run_folder = RunFolder(sweep.path.parent / f"run-{number}")
    record.state, record.error, record.max_steps = state, error, 20
    if state != WAITING:
        record.folder, record.started = str(run_folder.path), started
    if state in (DONE, FAILED):
        record.ended = started + 60.0
    sweep.write(number, record)
    metrics = MetricsFile(run_folder)
    for step in range(steps):
        row = {"train/reward": step / 10, "time/step": STEP_S}
        metrics.append(step, row | ({"eval/reward": 0.75} if step % 5 == 0 else {}))
    metrics.close()
    path = run_folder.metrics  # as if the last step had just been written
    rows = [json.loads(line) | {"time": NOW} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_folder


@pytest.fixture
def sweep(tmp_path):
    folder = SweepFolder(tmp_path / "x")
    folder.path.mkdir()
    add_job(folder, DONE, 20, "loss=a", "seed=0")
    add_job(folder, RUNNING, 10, "loss=a", "seed=1")
    add_job(folder, FAILED, 3, "loss=b", "seed=0", error="vLLM ended")
    add_job(folder, WAITING, 0, "loss=b", "seed=1")
    return folder


def read(sweep, height=20, started=NOW - 100.0):
    console = Console(width=90, height=height + 6, record=True, file=io.StringIO())
    screen = SweepScreen(sweep, console)
    screen.started, screen.printed_at = started, NOW
    screen.read()
    return screen


def drawn(screen):
    screen.console.print(screen.picture(NOW))
    return [line.rstrip() for line in screen.console.export_text().splitlines()]


def test_the_picture_has_every_job_with_step_reward_and_time(sweep):
    title, bar, _, names, done, running, failed, waiting = drawn(read(sweep))
    # The running job has 10 steps of 6 s left, and a job took 60 s so far.
    assert " ".join(title.split()) == "sweep x 1 m 40 s, about 2 m 00 s left"
    assert bar.endswith("1 done, 1 running, 1 waiting, 1 failed")
    assert names.split() == ["steps", "reward", "eval"]
    assert " ".join(done.split()) == "done loss=a seed=0 20/20 1.450 0.750 1 m 00 s"
    assert " ".join(running.split()) == "running loss=a seed=1 10/20 0.450 0.750 1 m 00 s left"
    assert failed.startswith("failed    loss=b seed=0: vLLM ended")
    assert waiting.split() == ["waiting", "loss=b", "seed=1"]


def test_running_and_failed_jobs_are_shown_first_on_a_small_screen(sweep):
    lines = drawn(read(sweep, height=2))[4:]
    assert [line.split()[0] for line in lines] == ["running", "failed", "and"]
    assert lines[-1].split() == ["and", "2", "more"]


def test_a_job_without_a_step_shows_the_phase_of_its_start(sweep):
    run_folder = add_job(sweep, RUNNING, 0, "loss=c")
    assert any("loss=c: starting" in line for line in drawn(read(sweep)))
    Status(run_folder, "inference").set("starting vLLM (logs/inference.log)")
    Status(run_folder, "trainer.rank0").set("loading the model")
    assert any("loss=c: starting vLLM" in line for line in drawn(read(sweep)))
    Status(run_folder, "inference").set("serving")
    assert any("loss=c: loading the model" in line for line in drawn(read(sweep)))
    run_folder.warm_start.mkdir()
    assert any("loss=c: warm start" in line for line in drawn(read(sweep)))


def test_a_log_file_gets_a_line_per_change_and_the_progress_once_a_minute(sweep):
    screen = read(sweep, started=NOW - 200.0)
    lines = [line for later in (0, 30, 61) for line in screen.lines(NOW + later, last=False)]
    number, record = sweep.claim(["max_steps=20", "loss=a", "seed=1"])
    record.state, record.ended = DONE, NOW + 62.0
    sweep.write(number, record)
    screen.read()
    lines += screen.lines(NOW + 62, last=False)
    printed = [line.partition(" ")[2].strip() for line in lines]
    assert [line.split()[0] for line in printed[:3]] == ["done", "running", "failed"]
    assert "vLLM ended (" in printed[2]
    assert printed[2].endswith("logs/00002.log)")
    assert printed[3].startswith("1 done, 1 running, 1 waiting, 1 failed; 4 m 21 s")
    assert printed[4].startswith("running loss=a seed=1  steps 10/20  reward 0.450  eval 0.750")
    assert printed[5].startswith("done    loss=a seed=1")
    assert len(printed) == 6


def test_an_interrupted_job_shows_its_progress_and_the_cause(sweep):
    screen = read(sweep)
    screen.lines(NOW, last=False)
    number, record = sweep.claim(["max_steps=20", "loss=a", "seed=1"])
    record.state, record.error, record.ended = WAITING, "max_time=2h is over", NOW
    sweep.write(number, record)
    screen.read()
    words = screen.lines(NOW, last=False)[-1].split()[1:]
    assert " ".join(words) == (
        "waiting loss=a seed=1 steps 10/20 reward 0.450 eval 0.750 1 m 40 s max_time=2h is over "
        f"({relative_path(sweep.log_of(number))})"
    )
    (line,) = [line for line in drawn(screen) if "max_time" in line]
    assert line.startswith("waiting   loss=a seed=1: max_time=2h is over")
    assert "10/20" in line


def test_a_screen_that_cannot_be_drawn_does_not_end_the_sweep(sweep, caplog):
    add_job(sweep, RUNNING, 0, "loss=c", started=time.time() + 60)
    file = io.StringIO()
    file.close()
    with SweepScreen(sweep, Console(file=file, force_terminal=False)):
        pass
    assert "the screen is off" in caplog.text


def test_the_first_and_last_lines_of_a_sweep_count_its_jobs(sweep):
    sweep.write_info({"slots": [{"cores": [0, 1], "gpus": ["3"]}] * 2, "question": "Why?"})
    first = what_will_be_done(sweep, "python train.py")
    assert first.splitlines()[0] == "Why?"
    assert "4 jobs, 1 done before; 2 at once, each on 2 cores and 1 GPU" in first
    assert first.endswith("to resume it after an interruption:\n  python train.py")
    left = what_is_left(sweep, "python train.py")
    assert left == "3 of 4 jobs are not done (1 failed); to resume them:\n  python train.py"


def test_a_record_that_cannot_be_read_is_left_out(sweep):
    (sweep.jobs / "00001.json").write_text('{"overrides"')
    (sweep.jobs / "00002.json").write_text("[]")
    assert list(sweep.records()) == [0, 3]
    assert sweep.claim(["loss=new"])[0] == 4


def test_a_job_is_identified_without_the_place_of_its_run():
    one = ["seed=1", "loss=a", "run_name=x", "+resume=true"]
    assert identity(one) == identity(["loss=a", "seed=1"]) != identity(["loss=a", "seed=2"])
    assert labels([["a=1", "b=1"], ["a=1", "b=2"]]) == ["b=1", "b=2"]
    assert labels([["a=1"]]) == ["a=1"]
    assert labels([]) == []
