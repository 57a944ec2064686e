"""The slots of the jobs of a sweep, and the lines about jobs."""

import os

import pytest

from lab.sweeps import overview
from lab.sweeps.slots import Slot, hold_slot, slots_of
from rl.config.schema import ConfigError
from rl.runtime.folder import RunFolder
from rl.runtime.sweep_folder import DONE, RUNNING, WAITING, JobRecord, SweepFolder
from tests.support.golden import golden
from tests.support.outcomes import without

EIGHT = list(range(8))
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
LOCAL = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"


def joblib(n_jobs):
    return {"_target_": JOBLIB, "n_jobs": n_jobs}


def local(cpus_per_task=None, gpus_per_node=None):
    return {"_target_": LOCAL, "cpus_per_task": cpus_per_task, "gpus_per_node": gpus_per_node}


@pytest.mark.parametrize(
    ("launcher", "cores", "gpus", "expected"),
    [
        (joblib(3), EIGHT, [], [((0, 1), ()), ((2, 3), ()), ((4, 5), ())]),
        (joblib(1), EIGHT, ["0"], []),  # in the sweep's process, without slots
        (joblib(9), [0, 1], [], [((0,), ()), ((1,), ())]),  # at least one core each
        (joblib(-1), EIGHT, [], [((i, i + 1), ()) for i in (0, 2, 4, 6)]),
        (joblib(-1), EIGHT, ["0", "2"], [((0, 1, 2, 3), ("0",)), ((4, 5, 6, 7), ("2",))]),
        (joblib(2), EIGHT, ["0"], [(tuple(EIGHT), ("0",))]),  # the second job waits
        (local(), [0, 1], [], [((0, 1), ())]),
        (local(cpus_per_task=3), EIGHT, [], [((0, 1, 2), ()), ((3, 4, 5), ())]),
        (local(gpus_per_node=2), EIGHT, list("0123"),
         [((0, 1, 2, 3), ("0", "1")), ((4, 5, 6, 7), ("2", "3"))]),
        (local(cpus_per_task=4, gpus_per_node=1), EIGHT, list("0123"),
         [((0, 1, 2, 3), ("0",)), ((4, 5, 6, 7), ("1",))]),
        ({"_target_": LOCAL.replace("Local", "Slurm"), "cpus_per_task": 4}, EIGHT, ["0"], []),
    ],
)  # fmt: skip
def test_slots_share_the_machine(launcher, cores, gpus, expected):
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
    records = {0: done, 1: running, 2: JobRecord([], state=WAITING)}
    left = overview.RecordedJobs(records, 50.0, num_slots).seconds_left
    assert left == pytest.approx(60 * jobs)


def test_a_record_that_cannot_be_read_is_left_out(tmp_path):
    sweep = SweepFolder(tmp_path)
    assert [sweep.claim([f"seed={seed}"])[0] for seed in range(4)] == [0, 1, 2, 3]
    (sweep.jobs / "00001.json").write_text('{"overrides"')
    (sweep.jobs / "00002.json").write_text("[]")
    assert list(sweep.records()) == [0, 3]
    assert sweep.claim(["loss=new"])[0] == 4


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
