"""Give each parallel job on a machine a slot: cores and GPUs that no other job uses.

A process reserves a slot by locking files that all sweeps of a user share, one file per core or
GPU. The kernel releases the locks when the process ends. The process and its children use only the
cores and GPUs of the slot. lab/cli/sweep.py sets OMP_NUM_THREADS.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError, as_config_error
from rl.runtime.files import make_private_folder
from rl.runtime.lock import try_lock

_TICK_S = 0.5
_CORES_PER_JOB = 2  # one core for vLLM and one core for the trainer


@dataclass(frozen=True)
class Slot:
    cores: tuple[int, ...]  # ids of logical CPUs
    gpus: tuple[str, ...]  # device ids as in CUDA_VISIBLE_DEVICES


def slots_of(launcher: Mapping[str, Any], cores: Sequence[int], gpus: Sequence[str]) -> list[Slot]:
    """Return the slots for a launcher's jobs on this machine, or [] if no slots are necessary.

    All slots have the same size. Their number is n_jobs (joblib), or what cpus_per_task and
    gpus_per_node allow (submitit_local). The default is one slot per GPU, or per two cores on a
    machine without GPUs. No two slots share a GPU.
    """
    kind = str(launcher.get("_target_")).rpartition(".")[2]
    num_jobs = launcher.get("n_jobs") or 0
    if kind not in ("JoblibLauncher", "LocalLauncher") or num_jobs == 1:
        return []  # the jobs run one after another, or a scheduler assigns cores and GPUs
    per_core, per_gpu = launcher.get("cpus_per_task") or 0, launcher.get("gpus_per_node") or 0
    for key, each, found in (("cpus_per_task", per_core, cores), ("gpus_per_node", per_gpu, gpus)):
        if each > len(found):
            has = f"this machine has only {len(found)} {'GPUs' if found is gpus else 'cores'}"
            raise ConfigError([f"hydra.launcher.{key}={each}, but {has}: lower {key}"])
    limits = [len(found) // n for n, found in ((per_core, cores), (per_gpu, gpus)) if n]
    default = len(gpus) or max(len(cores) // _CORES_PER_JOB, 1)
    wanted = max(num_jobs, 0) or min(limits, default=default)
    num = min(wanted, len(cores), len(gpus) or len(cores))
    num_cores, num_gpus = per_core or len(cores) // num, per_gpu or len(gpus) // num
    return [
        Slot(
            tuple(cores[i * num_cores : (i + 1) * num_cores]),
            tuple(gpus[i * num_gpus : (i + 1) * num_gpus]),
        )
        for i in range(num)
    ]


@contextmanager
def hold_slot(slots: Sequence[Slot], folder: Path | None = None) -> Iterator[Slot | None]:
    """Wait for a free slot and restrict this process to it while the block runs."""
    if not slots:
        yield None
        return
    with as_config_error():
        name = f"offbyone-slots-{os.getuid()}"
        folder = make_private_folder(folder or Path(tempfile.gettempdir(), name))
    while True:
        for slot in slots:
            with ExitStack() as locks:
                names = [*(f"core-{c}" for c in slot.cores), *(f"gpu-{g}" for g in slot.gpus)]
                paths = (folder / name.replace("/", "-") for name in names)
                if all(try_lock(locks.enter_context(path.open("a"))) for path in paths):
                    with _confine_to(slot):
                        yield slot
                    return
        time.sleep(_TICK_S)


@contextmanager
def _confine_to(slot: Slot) -> Iterator[None]:
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
