"""The cores, GPUs, memory and open files that this process may use, found without torch."""

import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_MOST_FILES = 65_536  # upper bound of the open-files limit; kernel tables grow with the limit


@dataclass(frozen=True, kw_only=True)
class Host:
    """The resources of one machine.

    Attributes:
        devices: GPU names, as in CUDA_VISIBLE_DEVICES.
        cores: number of physical cores that this process may use.
        cpus: number of logical CPUs that this process may use.
        num_threads: value of OMP_NUM_THREADS, None if unset.
        memory: bytes of host memory, limited by the cgroup; None if unknown.
        free_memory: free bytes of `memory`; None if unknown.
        device_memory: memory of the smallest GPU in bytes; None if unknown.
    """

    devices: tuple[str, ...] = ()
    cores: int = 2
    cpus: int = 2
    num_threads: int | None = None
    memory: int | None = None
    free_memory: int | None = None
    device_memory: int | None = None


def this_host() -> Host:
    """Return the resources of this machine."""
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
    """Return the total and the free bytes of memory, limited by the machine and by the cgroup."""
    total = {key: int(value) << 10 for key, value in _read_numbers(system).items()}
    both = [(total.get("MemTotal:"), total.get("MemAvailable:"))]
    limit, used = (_read(group / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        # The page cache is reclaimable, so it counts as free.
        files = _read_numbers(group / "memory.stat").get("inactive_file", 0)
        both.append((int(limit), int(limit) - int(used) + files))
    known = [(size, free) for size, free in both if size is not None and free is not None]
    if not known:
        return None, None
    return min(size for size, _ in known), min(free for _, free in known)


def _read_numbers(path: Path) -> dict[str, int]:
    """Parse a file whose lines are `name number` into a dictionary."""
    lines = [line.split() for line in _read(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def gpu_memory(gpus: Sequence[str]) -> int | None:
    """Return the memory of the smallest of these GPUs in bytes, None if nvidia-smi fails."""
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
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs if the variable is not set.

    Count the driver's files, because an installed nvidia-smi does not prove that a GPU exists.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*"))
    if not numbers and (devices / "dxg").exists():  # WSL has dxg instead of nvidia* files
        numbers = [0]
    if listed is None or not numbers:
        return [str(number) for number in numbers]
    return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]


def visible_cores() -> list[int]:
    """Return the logical CPUs that this process may use; CPUs of one physical core are adjacent."""
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (core_of(cpu), cpu))


def core_of(cpu: int) -> int:
    """Return the lowest logical CPU of the same physical core, which serves as the core's id."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def raise_open_files() -> int:
    """Raise the soft limit of open files, at most to the hard limit; return the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return open_files()


def open_files() -> int:
    """Return the soft limit of open files, at most _MOST_FILES."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES)
