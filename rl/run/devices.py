"""Which cores and GPUs this process may use, asked of the system without importing torch."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a machine offers to a run.

    Attributes:
        devices: its GPUs, as CUDA_VISIBLE_DEVICES names them.
        cores: physical ones that we may use.
        cpus: logical ones that we may use.
        num_threads: OMP_NUM_THREADS, where somebody has set it.
        memory: bytes that it has, or that our cgroup may take; None: nobody knows.
        free_memory: bytes of those that nobody has taken.
        device_memory: bytes of the smallest GPU; None: nobody knows.

    """

    devices: tuple[str, ...] = ()
    cores: int = 2
    cpus: int = 2
    num_threads: int | None = None
    memory: int | None = None
    free_memory: int | None = None
    device_memory: int | None = None


def this_host() -> Host:
    """Ask this machine."""
    cpus, num_threads = visible_cores(), os.environ.get("OMP_NUM_THREADS", "")
    gpus, (memory, free) = visible_gpus(), _memory()
    return Host(
        devices=tuple(gpus),
        cores=len({core_of(cpu) for cpu in cpus}),
        cpus=len(cpus),
        num_threads=int(num_threads) if num_threads.isdigit() else None,
        memory=memory,
        free_memory=free,
        device_memory=gpu_memory(gpus) if gpus else None,
    )


def _memory(
    system: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> tuple[int | None, int | None]:
    """Bytes of this machine, or of the cgroup that we are in, and how many of them are free."""
    total = {key: int(value) << 10 for key, value in _numbers(system).items()}
    both = [(total.get("MemTotal:"), total.get("MemAvailable:"))]
    limit, used = (_read(group / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        # Pages of files that nobody reads just now are given back when memory is wanted.
        files = _numbers(group / "memory.stat").get("inactive_file", 0)
        both.append((int(limit), int(limit) - int(used) + files))
    known = [(size, free) for size, free in both if size is not None and free is not None]
    if not known:
        return None, None
    return min(size for size, _ in known), min(free for _, free in known)


def _numbers(path: Path) -> dict[str, int]:
    """`name number` in each line of a file."""
    lines = [line.split() for line in _read(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def gpu_memory(gpus: Sequence[str]) -> int | None:
    """Bytes of the smallest of these, as the driver's own tool says; None if it does not answer."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    query += ["-i", ",".join(gpus)]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return min(int(line) for line in done.stdout.split()) * _MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """What CUDA_VISIBLE_DEVICES may hold: the GPUs it lists, else those of the driver's devices.

    A tool on the PATH proves none, nor does a GPU that CUDA_VISIBLE_DEVICES hides.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*"))
    if not numbers and (devices / "dxg").exists():  # in WSL
        numbers = [0]
    if listed is None or not numbers:
        return [str(number) for number in numbers]
    return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]


def visible_cores() -> list[int]:
    """The logical CPUs, those that share a core beside each other."""
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (core_of(cpu), cpu))


def core_of(cpu: int) -> int:
    """The lowest logical CPU of this one's core, which stands for the core."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu
