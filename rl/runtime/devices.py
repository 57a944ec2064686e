"""The cores, GPUs, memory and open files that this process may use, found without torch."""

import os
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MIB = 1 << 20
_MOST_FILES = 65_536  # kernel tables grow with the limit


@dataclass(frozen=True, kw_only=True)
class Host:
    """The resources of one machine.

    Attributes:
        devices: GPUs, as CUDA_VISIBLE_DEVICES names them.
        cores: physical cores that this process may use.
        cpus: logical CPUs that this process may use.
        num_threads: OMP_NUM_THREADS, None if it is not set.
        memory: bytes of the machine, or the limit of this cgroup; None: unknown.
        free_memory: bytes of `memory` that are free; None: unknown.
        device_memory: bytes of the smallest GPU; None: unknown.

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
    """Return the total and the free bytes of this machine, or of this cgroup if it has fewer."""
    total = {key: int(value) << 10 for key, value in _numbers(system).items()}
    both = [(total.get("MemTotal:"), total.get("MemAvailable:"))]
    limit, used = (_read(group / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        # The page cache is reclaimable, so it counts as free.
        files = _numbers(group / "memory.stat").get("inactive_file", 0)
        both.append((int(limit), int(limit) - int(used) + files))
    known = [(size, free) for size, free in both if size is not None and free is not None]
    if not known:
        return None, None
    return min(size for size, _ in known), min(free for _, free in known)


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are `name number`."""
    lines = [line.split() for line in _read(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def gpu_memory(gpus: Sequence[str]) -> int | None:
    """Return the bytes of the smallest of these GPUs by nvidia-smi, None if it fails."""
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
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists, else those of the driver.

    An installed nvidia-smi does not prove that there is a GPU, so the driver's files are counted.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*"))
    if not numbers and (devices / "dxg").exists():  # in WSL
        numbers = [0]
    if listed is None or not numbers:
        return [str(number) for number in numbers]
    return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]


def visible_cores() -> list[int]:
    """Return the logical CPUs that this process may use, those of one core side by side."""
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (core_of(cpu), cpu))


def core_of(cpu: int) -> int:
    """Return the lowest logical CPU of the same physical core, which identifies the core."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard limit; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return open_files()


def open_files() -> int:
    """Return the soft limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, _MOST_FILES)
