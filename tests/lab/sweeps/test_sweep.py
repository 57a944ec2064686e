"""Sweeps that are interrupted and resumed, with jobs in sequence and at the same time."""

import json
import os
import signal

import pytest
from omegaconf import OmegaConf

from lab.cli import sweep as module
from lab.cli.sweep import record_jobs, rerun_command, vary_seeds_last
from lab.sweeps import overview
from lab.sweeps.job import is_done, run_job
from lab.sweeps.slots import Slot, hold_slot, slots_of
from rl.config.schema import ConfigError
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.runtime.stop_request import Stopped, stopped_by_signals
from rl.runtime.sweep_folder import DONE, RUNNING, WAITING, JobRecord, SweepFolder
from tests.support.launching import alive, groups_below, wait_for
from tests.support.sweep_app import SweepApp

DIR = "hydra.sweep.dir=outputs/x"
AT_ONCE = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
JOBS = ["--multirun", "rate=0.5,0.7", "seed=0,1", DIR]
FRESH = [f"rate={rate} seed={seed} from 0" for rate in (0.5, 0.7) for seed in (0, 1)]


@pytest.fixture
def app(tmp_path):
    return SweepApp(tmp_path)


def records(app):
    return list(SweepFolder(app.folder / "outputs" / "x").records().values())


def what_ran(app):
    """Return the jobs that ran, sorted, because parallel jobs have no order."""
    return sorted(line.partition(" on ")[0] for line in app.calls())


def report_of(app):
    return json.loads((app.folder / "outputs" / "x" / "report.json").read_text())


def test_a_started_again_sweep_skips_finished_jobs_and_resumes_failed_gone_and_longer_ones(app):
    jobs = [*JOBS, "crash=error"]
    status, output = app.run(*jobs)
    assert status == 1, output
    assert what_ran(app) == FRESH
    # The first seed of every arm runs before the second seed of any arm.
    states = [(record.overrides[:2], record.state) for record in records(app)]
    assert states == [
        ([f"seed={seed}", f"rate={rate}"], state)
        for seed, state in ((0, "done"), (1, "failed"))
        for rate in (0.5, 0.7)
    ]
    assert "2 of 4 jobs are not done (2 failed); to resume them:\n" in output
    ended = [(arm["seeds"], arm["failed"], arm["errors"]) for arm in report_of(app)["arms"]]
    assert ended == [(2, 1, ["vLLM is gone"])] * 2
    before = [record.folder for record in records(app)]
    last = max(record.ended for record in records(app))
    (app.folder / "mended").touch()
    status, output = app.run(*jobs)
    assert status == 0, output
    # A job that was interrupted before this start counts as one that this start will begin.
    assert SweepFolder(app.folder / "outputs" / "x").read_info()["started"] > last
    assert what_ran(app) == ["rate=0.5 seed=1 from 2", "rate=0.7 seed=1 from 2"]
    assert [(record.state, record.error) for record in records(app)] == [("done", None)] * 4
    assert [record.folder for record in records(app)] == before
    arms = report_of(app)["arms"]
    assert [(arm["run"], arm["seeds"]) for arm in arms] == [("rate=0.7", 2), ("rate=0.5", 2)]
    assert [arm["reward"] for arm in arms] == pytest.approx([1.2, 1.0])
    assert report_of(app)["conclusion"] in output
    status, output = app.run(*jobs)
    assert (status, what_ran(app)) == (0, [])
    assert "outputs/x, 4 jobs, 4 already done\nall 4 jobs are finished\n" in output
    folder = app.folder / "outputs" / str(records(app)[0].run_name)
    folder.rename(folder.with_name("elsewhere"))
    app.run(*jobs)
    assert what_ran(app) == FRESH[:1]
    config = app.folder / "app.yaml"
    config.write_text(config.read_text().replace("max_steps: 10", "max_steps: 12"))
    app.run(*jobs)
    assert what_ran(app) == [line.replace("from 0", "from 10") for line in FRESH]


def test_a_job_that_exits_does_not_end_a_sequential_sweep(app):
    status, _ = app.run("--multirun", "seed=range(3)", "crash=exit", DIR)
    assert status == 1
    (arm,) = report_of(app)["arms"]
    assert (arm["seeds"], arm["failed"], arm["reward"]) == (3, 1, pytest.approx(1.5))
    assert arm["errors"] == ["ended with status 3"]


def test_each_job_records_how_often_the_sweep_had_grown_and_only_the_latest_count(tmp_path):
    sweep = SweepFolder(tmp_path)
    old = [[f"seed={seed}"] for seed in range(3)]
    assert record_jobs(sweep, old) == [0, 1, 2]
    new = [["seed=5"], ["seed=1"], ["seed=6"], ["seed=5", "resume=true"]]
    assert record_jobs(sweep, new) == [3, 1, 4, 3]
    record_jobs(sweep, new)  # adds nothing
    record_jobs(sweep, [["seed=7"], ["seed=1"]])
    grown = {number: record.grown for number, record in sweep.records().items()}
    assert grown == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
    sweep.write_info({"jobs": [1, 5]})
    assert list(overview.read_jobs(sweep).records) == [1, 5]


@pytest.mark.parametrize("content", ["max_steps: [", "{}"])
def test_a_job_whose_configuration_is_damaged_is_not_done(content, tmp_path):
    record = JobRecord([], state="done", folder=str(tmp_path))
    (tmp_path / "config.yaml").write_text("max_steps: 3")
    assert [is_done(record, steps) for steps in (2, 3, 4)] == [True, True, False]
    (tmp_path / "config.yaml").write_text(content)
    assert not is_done(record, 3)


def test_the_command_that_resumes_a_sweep_suits_hydra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for typed, kept in (
        ("hydra.sweep.dir=y accept_changed_code=true seed=0,1 -m", "seed=0,1 -m"),
        ("~kl +a=1 -m", "'~kl' +a=1 -m"),
    ):
        again = rerun_command(["python", "train.py", *typed.split()], tmp_path / "x")
        assert again == f"python train.py {kept} hydra.sweep.dir=x"


def test_one_folder_has_one_sweep_at_a_time(app):
    first = app.start(*JOBS, "pause=5")
    try:
        assert wait_for(lambda: any(r.state == "running" for r in records(app)), 30)
        status, output = app.run(*JOBS)
        assert status == 2
        assert output.startswith("this sweep cannot start:\n")
        assert f"is used by process {first.pid}" in output
    finally:
        first.kill()
        first.communicate()


def test_parallel_jobs_have_their_own_cores_and_print_their_ends(app):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    status, output = app.run(*JOBS, *AT_ONCE, "pause=0.1", "crash=error")
    assert status == 1, output
    half = len(cores) // 2
    shares = {"".join(map(str, cores[:half])), "".join(map(str, cores[half : 2 * half]))}
    assert {line.partition(" on ")[2] for line in app.calls()} == shares
    assert f"; 2 in parallel (cores of each: {half}, " in output
    assert output.count(" done job ") == output.count(" failed job ") == 2
    assert ", training reward 0.500; " in output
    assert "; 2 done, 2 failed\n" in output
    assert "printed by a job" not in output
    folder = SweepFolder(app.folder / "outputs" / "x")
    assert overview.read_jobs(folder).num_slots == 2
    # The program's command, not the launcher's, because it resumes a single run.
    assert folder.log_of(0).read_text() == "printed by a job app.py\n"
    assert folder.log_of(2).read_text().endswith("the run failed:\nvLLM is gone\nand more\n")


@pytest.mark.parametrize(
    ("launcher", "sent"),
    [
        pytest.param(AT_ONCE, signal.SIGKILL, marks=pytest.mark.slow),
        (AT_ONCE, signal.SIGINT),
        pytest.param(AT_ONCE, signal.SIGTERM, marks=pytest.mark.slow),
        (["hydra/launcher=submitit_local", "hydra.launcher.cpus_per_task=1"], signal.SIGKILL),
    ],
)
def test_a_killed_sweep_leaves_no_process_and_then_runs_only_missing_jobs(launcher, sent, app):
    jobs = ["--multirun", "seed=0,2,3", "pause=0.1", DIR]
    process = app.start(*jobs, *launcher)

    def is_in_the_middle():
        return {"done", "running"} <= {record.state for record in records(app)}

    try:
        assert wait_for(is_in_the_middle, 60)
        groups = groups_below(process.pid) | {process.pid}
        if sent == signal.SIGINT:  # a terminal sends it to all of them
            os.killpg(process.pid, sent)
        else:
            os.kill(process.pid, sent)
        assert wait_for(lambda: not alive(groups), 30), alive(groups)  # it may still draw the page
    finally:
        process.kill()
    output, _ = process.communicate()
    if sent != signal.SIGKILL:
        assert process.returncode == 130, output
        assert "to resume them:" in output, output
    what_ran(app)
    done = [r.run_name for r in records(app) if r.state == "done"]
    status, output = app.run(*jobs)  # with another launcher, it is the same sweep
    assert status == 0, output
    assert len(what_ran(app)) == 3 - len(done) < 3
    assert [record.state for record in records(app)] == ["done"] * 3


@pytest.mark.parametrize("waits", [True, False])
def test_a_launcher_gets_the_signal_that_ended_its_job(waits, tmp_path):
    sweep = SweepFolder(tmp_path)
    sweep.write_info({"process": {"host": "elsewhere", "pid": 1}, "slots": []})
    heard: list[int] = []

    def start(*_):
        with stopped_by_signals() as stop:
            stop.waits = waits
            signal.raise_signal(signal.SIGUSR2)
        raise Stopped(stop.number)

    before = signal.signal(signal.SIGUSR2, lambda number, _: heard.append(number))
    try:
        with pytest.raises(RunFailed):
            run_job(sweep, [], output_dir=tmp_path, run_name="x", max_steps=1, start=start)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]
    assert sweep.records()[0].state == "waiting"


def test_a_job_that_is_out_of_time_waits_and_resumes_at_next_start(tmp_path):
    sweep = SweepFolder(tmp_path)
    sweep.write_info({"process": {"host": "here", "pid": os.getpid()}, "slots": []})
    starts = []

    def start(name, resume):
        starts.append((name, resume))
        now = sweep.records()[0]
        assert (now.state, now.error, now.ended) == ("running", "did not end", None)
        if len(starts) == 1:
            MetricsFile(RunFolder(tmp_path / name)).append(0, {})
            raise OutOfTime("time is over")
        return 1.0

    def job():
        return run_job(sweep, [], output_dir=tmp_path, run_name="x", max_steps=2, start=start)

    with pytest.raises(OutOfTime):
        job()
    record = sweep.records()[0]
    assert (record.state, record.error, record.max_steps) == ("waiting", "time is over", 2)
    assert job() == 1.0
    assert starts == [("x-0", False), ("x-0", True)]
    assert sweep.records()[0].state == "done"


def test_the_seed_of_a_config_file_varies_last():
    for kind, task in (
        ("hydra.BasicSweeper", ["seed=0,1", "rate=1,2", "pause=3"]),
        ("optuna.Sweeper", ["pause=3"]),
    ):
        sweeper = {"_target_": kind, "params": {"rate": "1,2", "seed": "0,1"}}
        config = OmegaConf.create(
            {"hydra": {"sweeper": sweeper, "overrides": {"task": ["pause=3"]}}}
        )
        vary_seeds_last(config)
        assert config.hydra.overrides.task == task


@pytest.mark.parametrize(
    ("smallest_effect", "max_hours", "wrong"),
    [(0.1, None, 0), (1, 24, 0), (0, 0, 2), (True, "1h", 2), (None, None, 1)],
)
def test_every_wrong_option_of_until_is_named(smallest_effect, max_hours, wrong):
    until = {"smallest_effect": smallest_effect, "max_hours": max_hours}
    hydra = {"sweeper": {"_target_": "optuna.Sweeper"}, "overrides": {"task": ["a=1,2", "seed=3"]}}
    with pytest.raises(ConfigError) as refused:
        module.use_until(OmegaConf.create({"until": until, "hydra": hydra}))
    assert refused.value.problems == [
        *[f"until.{k}={v}: set it to a number above 0" for k, v in [*until.items()][:wrong]],
        "until=decided cannot use optuna.Sweeper: remove hydra/sweeper=...",
        "until=decided chooses the seeds: remove seed=3",
    ]


EIGHT = list(range(8))
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
LOCAL = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"


def joblib(n_jobs):
    return {"_target_": JOBLIB, "n_jobs": n_jobs}


def local(cpus_per_task=None, gpus_per_node=None):
    return {"_target_": LOCAL, "cpus_per_task": cpus_per_task, "gpus_per_node": gpus_per_node}


def test_slots_share_the_machine():
    for launcher, cores, gpus, expected in (
        (joblib(1), EIGHT, ["0"], []),  # in the sweep's process, without slots
        (joblib(9), [0, 1], [], [((0,), ()), ((1,), ())]),  # at least one core each
        (joblib(-1), EIGHT, [], [((i, i + 1), ()) for i in (0, 2, 4, 6)]),
        (joblib(-1), EIGHT, ["0", "2"], [((0, 1, 2, 3), ("0",)), ((4, 5, 6, 7), ("2",))]),
        (joblib(2), EIGHT, ["0"], [(tuple(EIGHT), ("0",))]),  # the second job waits
        (local(), [0, 1], [], [((0, 1), ())]),
        (local(cpus_per_task=3), EIGHT, [], [((0, 1, 2), ()), ((3, 4, 5), ())]),
        (local(gpus_per_node=2), EIGHT, list("0123"),
         [((0, 1, 2, 3), ("0", "1")), ((4, 5, 6, 7), ("2", "3"))]),
        ({"_target_": LOCAL.replace("Local", "Slurm"), "cpus_per_task": 4}, EIGHT, ["0"], []),
    ):  # fmt: skip
        slots = slots_of(launcher, cores, gpus)
        assert [(slot.cores, slot.gpus) for slot in slots] == expected
        for devices in ([slot.cores for slot in slots], [slot.gpus for slot in slots]):
            taken = [device for each in devices for device in each]
            assert len(set(taken)) == len(taken)


def test_more_devices_than_the_machine_has_are_refused():
    with pytest.raises(ConfigError, match="gpus_per_node=1, but this machine has only 0"):
        slots_of(local(gpus_per_node=1), EIGHT, [])


def test_a_slot_restricts_this_process_until_the_block_ends(tmp_path, monkeypatch):
    before = os.sched_getaffinity(0)
    cores = {min(before), max(before)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides all GPUs
    with hold_slot([Slot(tuple(cores), ("3", "MIG-GPU-4/1/0"))], tmp_path):
        assert os.sched_getaffinity(0) == cores
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,MIG-GPU-4/1/0"
        locks = {path.name for path in tmp_path.iterdir()}  # one of each core and of each GPU
        assert locks == {*(f"core-{core}" for core in cores), "gpu-3", "gpu-MIG-GPU-4-1-0"}
    assert os.sched_getaffinity(0) == before
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("num_slots", "max_steps", "jobs"),
    # With two slots, the running job ends before the waiting job.
    [(1, 100, 1.4), (2, 100, 1), (1, 50, 1), (1, None, 2)],
)
def test_a_running_job_counts_by_the_steps_that_are_left(num_slots, max_steps, jobs, tmp_path):
    RunFolder(tmp_path).metrics.write_text('{"step": 59}\n')
    done = JobRecord([], state=DONE, started=100.0, ended=160.0)
    running = JobRecord([], state=RUNNING, folder=str(tmp_path), max_steps=max_steps)
    stopped = JobRecord([], state=WAITING, ended=60.0)  # since the start at 50
    records = {0: done, 1: running, 2: JobRecord([], state=WAITING), 3: stopped}
    recorded = overview.RecordedJobs(records, 50.0, num_slots)
    assert recorded.seconds_left == pytest.approx(60 * jobs)
    assert recorded.progress().startswith("1 done, 1 running, 2 waiting, about ")


def test_a_record_that_cannot_be_read_is_left_out(tmp_path):
    sweep = SweepFolder(tmp_path)
    assert [sweep.claim([f"seed={seed}"])[0] for seed in range(4)] == [0, 1, 2, 3]
    (sweep.jobs / "00001.json").write_text('{"overrides"')
    (sweep.jobs / "00002.json").write_text("[]")
    assert list(sweep.records()) == [0, 3]
    assert sweep.claim(["loss=new"])[0] == 4
