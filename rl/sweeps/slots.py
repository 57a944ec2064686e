"""Slots: jobs of sweeps that run side by side on one machine get cores and GPUs of their own.

A slot is taken by a lock of the kernel's on a file for each of its devices, which all sweeps of a
user share. It ends with whoever holds it, however that ends. A process that has a slot may run on
its cores alone, and so may all that it starts; how many threads there are follows from that
(rl/inference/server.py, rl/trainer/loop.py).
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError

_TICK_S = 0.5
_CORES_OF_A_JOB = 2  # unless said: one for vLLM, one for the trainer


@dataclass(frozen=True)
class Slot:
    """What one of the jobs side by side has to itself."""

    cores: tuple[int, ...]  # logical CPUs
    gpus: tuple[str, ...]  # as in CUDA_VISIBLE_DEVICES


def slots_of(launcher: Mapping[str, Any], cores: Sequence[int], gpus: Sequence[str]) -> list[Slot]:
    """The slots of a launcher's jobs on this machine; none where it places them itself.

    Jobs get equal shares. How many there are: joblib's n_jobs, what submitit_local's cpus_per_task
    and gpus_per_node leave room for, else a GPU each, or two cores each. Never two on one GPU.
    """
    kind = str(launcher.get("_target_")).rpartition(".")[2]
    if kind == "JoblibLauncher" and launcher["n_jobs"] != 1:  # one runs where the sweep does
        wanted, per_core, per_gpu = max(launcher["n_jobs"], 0), 0, 0
    elif kind == "LocalLauncher":
        wanted, per_core = 0, launcher["cpus_per_task"] or 0
        per_gpu = launcher["gpus_per_node"] or 0
    else:  # one after the other, or placed by a scheduler
        return []
    room = [
        _room("cpus_per_task", per_core, len(cores), "cores"),
        _room("gpus_per_node", per_gpu, len(gpus), "GPUs"),
    ]
    rooms = [most for most in room if most]
    default = len(gpus) or max(len(cores) // _CORES_OF_A_JOB, 1)
    num = min(wanted or (min(rooms) if rooms else default), len(cores), len(gpus) or len(cores))
    num_cores, num_gpus = per_core or len(cores) // num, per_gpu or len(gpus) // num
    return [
        Slot(
            tuple(cores[i * num_cores : (i + 1) * num_cores]),
            tuple(gpus[i * num_gpus : (i + 1) * num_gpus]),
        )
        for i in range(num)
    ]


def _room(key: str, each: int, there: int, what: str) -> int:
    if each > there:
        raise ConfigError(
            [f"hydra.launcher.{key}={each}, and this machine has {there} {what}: lower it"]
        )
    return there // each if each else 0


@contextmanager
def slot_of(slots: Sequence[Slot], folder: Path | None = None) -> Iterator[Slot | None]:
    """Wait for the first free slot and run on it alone while the block lasts; None without slots.

    `folder` is where the locks lie, one of this machine that all of the user's sweeps share.
    """
    if not slots:
        yield None
        return
    folder = folder or Path(tempfile.gettempdir(), f"offbyone-slots-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        for slot in slots:
            with ExitStack() as locks:
                if all(_locked(locks, path) for path in _files(slot, folder)):
                    with _confined_to(slot):
                        yield slot
                    return
        time.sleep(_TICK_S)


def _files(slot: Slot, folder: Path) -> list[Path]:
    names = [f"core-{core}" for core in slot.cores] + [f"gpu-{gpu}" for gpu in slot.gpus]
    return [folder / name.replace("/", "-") for name in names]


def _locked(locks: ExitStack, path: Path) -> bool:
    # Not inherited by what we start: Python closes descriptors on exec.
    file = locks.enter_context(path.open("a"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _confined_to(slot: Slot) -> Iterator[None]:
    """Let this thread, and all that it starts, see the slot's devices alone."""
    cores, gpus = os.sched_getaffinity(0), os.environ.get("CUDA_VISIBLE_DEVICES")
    os.sched_setaffinity(0, slot.cores)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
