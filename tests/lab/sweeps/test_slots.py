"""The slots of a machine as a table, and the kernel locks between processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.sweeps.slots import Slot, hold_slot, slots_of
from rl.config.schema import ConfigError
from tests.support.launching import wait_for

REPO = Path(__file__).parents[3]
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
        (joblib(2), EIGHT, [], [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ())]),
        (joblib(3), EIGHT, [], [((0, 1), ()), ((2, 3), ()), ((4, 5), ())]),
        (joblib(1), EIGHT, ["0"], []),  # in the sweep's process, without slots
        (joblib(2), [3, 5], [], [((3,), ()), ((5,), ())]),
        (joblib(9), [0, 1], [], [((0,), ()), ((1,), ())]),  # at least one core each
        (joblib(-1), EIGHT, [], [((i, i + 1), ()) for i in (0, 2, 4, 6)]),
        (joblib(-1), [0], [], [((0,), ())]),
        (joblib(-1), EIGHT, ["0", "2"], [((0, 1, 2, 3), ("0",)), ((4, 5, 6, 7), ("2",))]),
        (joblib(2), EIGHT, ["0"], [(tuple(EIGHT), ("0",))]),  # the second job waits
        (joblib(2), EIGHT, list("abcd"), [((0, 1, 2, 3), ("a", "b")), ((4, 5, 6, 7), ("c", "d"))]),
        (local(), [0, 1], [], [((0, 1), ())]),
        (local(cpus_per_task=2), [0, 1], [], [((0, 1), ())]),
        (local(cpus_per_task=1), [0, 1], [], [((0,), ()), ((1,), ())]),
        (local(cpus_per_task=3), EIGHT, [], [((0, 1, 2), ()), ((3, 4, 5), ())]),
        (local(gpus_per_node=2), EIGHT, list("0123"),
         [((0, 1, 2, 3), ("0", "1")), ((4, 5, 6, 7), ("2", "3"))]),
        (local(cpus_per_task=4, gpus_per_node=1), EIGHT, list("0123"),
         [((0, 1, 2, 3), ("0",)), ((4, 5, 6, 7), ("1",))]),
        ({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}, EIGHT, [], []),
        ({"_target_": LOCAL.replace("Local", "Slurm"), "cpus_per_task": 4}, EIGHT, ["0"], []),
    ],
)  # fmt: skip
def test_slots_share_the_machine(launcher, cores, gpus, expected):
    slots = slots_of(launcher, cores, gpus)
    assert [(slot.cores, slot.gpus) for slot in slots] == expected
    for devices in ([slot.cores for slot in slots], [slot.gpus for slot in slots]):
        taken = [device for each in devices for device in each]
        assert len(set(taken)) == len(taken)


@pytest.mark.parametrize(("option", "found"), [("cpus_per_task", 8), ("gpus_per_node", 0)])
def test_more_devices_than_the_machine_has_are_refused(option, found):
    problem = f"hydra.launcher.{option}=9, but this machine has only {found}"
    with pytest.raises(ConfigError, match=problem):
        slots_of(local(**{option: 9}), EIGHT, [])


@pytest.mark.parametrize("visible", ["7", ""])  # "" hides all GPUs
def test_a_slot_restricts_this_process_until_the_block_ends(visible, tmp_path, monkeypatch):
    before = os.sched_getaffinity(0)
    cores = {min(before), max(before)}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with hold_slot([Slot(tuple(cores), ("3", "MIG-GPU-4/1/0"))], tmp_path):
        assert os.sched_getaffinity(0) == cores
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,MIG-GPU-4/1/0"
        locks = {path.name for path in tmp_path.iterdir()}  # one of each core and of each GPU
        assert locks == {*(f"core-{core}" for core in cores), "gpu-3", "gpu-MIG-GPU-4-1-0"}
    assert os.sched_getaffinity(0) == before
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    with hold_slot([], tmp_path) as slot:
        assert slot is None


HOLDER = """
import sys, time
from pathlib import Path
from lab.sweeps.slots import Slot, hold_slot
core, gpu = int(sys.argv[2]), sys.argv[3]
with hold_slot([Slot((core,), ("0",)), Slot((core,), (gpu,))], Path(sys.argv[1])) as slot:
    print(slot.gpus[0], flush=True)
    time.sleep(float(sys.argv[4]))
"""


def test_a_device_belongs_to_one_job_until_its_process_ends(tmp_path):
    core = str(min(os.sched_getaffinity(0)))

    def holder(gpu, seconds):
        command = [sys.executable, "-c", HOLDER, str(tmp_path), core, gpu, seconds]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO)

    first = holder("1", "100")
    assert first.stdout.readline() == "0\n"
    second = holder("1", "0")  # the other slot has another GPU, and the same core
    assert not wait_for(lambda: second.poll() is not None, 2)
    first.kill()
    first.wait()
    assert second.communicate(timeout=20)[0] == "0\n"
