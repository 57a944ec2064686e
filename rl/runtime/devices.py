"""Find the cores, GPUs, memory and open files that this process may use, without torch."""

import os
import re
import resource
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

_QUERY = "--query-gpu=index,uuid,memory.total,driver_version,mig.mode.current"
# This pattern finds a MIG partition, its memory in GB and its UUID in the output of nvidia-smi -L.
_PARTITION = re.compile(r"^\s+MIG .*?(\d+)gb.*\(UUID: (MIG-[^)]+)\)")
_BFLOAT16 = {"avx512bw", "avx_ne_convert", "bf16"}  # with one of these, bfloat16 is fast
_MAX_FILES = 65_536  # highest limit of open files that we set; each open file needs kernel memory


@dataclass(frozen=True, kw_only=True)
class Host:
    devices: tuple[str, ...] = ()  # names of GPUs, as in CUDA_VISIBLE_DEVICES
    cores: int = 2  # number of physical cores that this process may use
    cpus: int = 2  # number of logical CPUs that this process may use
    num_threads: int | None = None  # value of OMP_NUM_THREADS; None if unset
    memory: int | None = None  # bytes of host memory, limited by the cgroup; None if unknown
    free_memory: int | None = None  # free bytes of `memory`; None if unknown
    device_memory: int | None = None  # memory of the smallest GPU in bytes; None if unknown
    driver: str | None = None  # version of NVIDIA's driver; None if unknown


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one MIG partition of a GPU, as nvidia-smi describes it."""

    name: str  # for CUDA_VISIBLE_DEVICES: a number, or the UUID of a partition
    uuid: str
    memory: int | None  # bytes
    driver: str


def this_host() -> Host:
    cpus, num_threads = visible_cpus(), os.environ.get("OMP_NUM_THREADS", "")
    gpus, (memory, free) = visible_gpus(), _memory()
    return Host(
        devices=tuple(gpus),
        cores=len({core_of(cpu) for cpu in cpus}),
        cpus=len(cpus),
        num_threads=int(num_threads) if num_threads.isdigit() else None,
        memory=memory,
        free_memory=free,
        device_memory=min_gpu_memory(gpus) if gpus else None,
        driver=next((gpu.driver for gpu in gpus_of_driver() if gpus), None),
    )


def _memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> tuple[int | None, int | None]:
    """Return (total, free) bytes: the minimum over machine and cgroup; (None, None) if unknown."""
    total = {key: int(value) << 10 for key, value in _read_numbers(meminfo).items()}
    both = [(total.get("MemTotal:"), total.get("MemAvailable:"))]
    limit, used = (_read(cgroup / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit():
        # The inactive file cache counts as free, because the kernel reclaims it when needed.
        files = _read_numbers(cgroup / "memory.stat").get("inactive_file", 0)
        both.append((int(limit), int(limit) - int(used) + files))
    known = [(size, free) for size, free in both if size is not None and free is not None]
    if not known:
        return None, None
    return min(size for size, _ in known), min(free for _, free in known)


def _read_numbers(path: Path) -> dict[str, int]:
    lines = [line.split() for line in _read(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


@cache
def gpus_of_driver() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi lists in this container, or () if nvidia-smi fails."""
    rows = [row.split(", ") for row in _nvidia_smi(_QUERY, "--format=csv,noheader,nounits")]
    if any(len(row) != 5 for row in rows):
        return ()
    gpus = [
        Gpu(index, uuid, int(mib) << 20 if mib.isdigit() else None, driver)
        for index, uuid, mib, driver, _ in rows
    ]
    if not any(row[4] == "Enabled" for row in rows):
        return tuple(gpus)
    # CUDA uses a partitioned GPU only through its partitions.
    whole = [gpu for gpu, row in zip(gpus, rows, strict=True) if row[4] != "Enabled"]
    found = [match for line in _nvidia_smi("-L") if (match := _PARTITION.match(line))]
    return *whole, *(Gpu(m[2], m[2], int(m[1]) * 10**9, gpus[0].driver) for m in found)


def _nvidia_smi(*arguments: str) -> list[str]:
    command = ["nvidia-smi", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.splitlines()


def min_gpu_memory(names: Sequence[str]) -> int | None:
    """Return the bytes of the smallest of these GPUs, or None if the memory of one is unknown."""
    sizes = [
        gpu.memory
        for name in names
        for gpu in gpus_of_driver()
        if gpu.name == name or (not name.isdigit() and gpu.uuid.startswith(name))
    ]
    known = [size for size in sizes if size is not None]
    return min(known) if len(known) == len(names) > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def fast_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return "float32" if there is no GPU and the CPU lacks _BFLOAT16, else "bfloat16"."""
    flags = set(_read(cpuinfo).split())
    # Look for GPUs last, because nvidia-smi may take seconds.
    return "bfloat16" if not flags or flags & _BFLOAT16 or visible_gpus() else "float32"


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs if the variable is not set.

    Like CUDA, ignore an unknown entry, such as -1, and all entries after it.
    nvidia-smi numbers the GPUs of a container from 0, as CUDA does. If nvidia-smi fails, count the
    driver's files in /dev. Ignore the numbers in their names, because these are the host's numbers.
    """
    names = [gpu.name for gpu in gpus_of_driver()]
    if not names:
        num_files = len([*devices.glob("nvidia[0-9]*")]) or (devices / "dxg").exists()  # under WSL
        names = [str(number) for number in range(num_files)]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not names:
        return names
    uuids = [gpu.uuid for gpu in gpus_of_driver()]

    def is_known(name: str) -> bool:
        # If a GPU has partitions, accept any UUID, because `gpus_of_driver` omits this GPU.
        if name.startswith("GPU-") and uuids and not any(u.startswith("MIG-") for u in uuids):
            return any(uuid.startswith(name) for uuid in uuids)
        return name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < len(names))

    return [*takewhile(is_known, map(str.strip, listed.split(",")))]


def visible_cpus() -> list[int]:
    """Return the logical CPUs that this process may use; CPUs of one physical core are adjacent."""
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (core_of(cpu), cpu))


def core_of(cpu: int) -> int:
    """Return the id of the CPU's physical core: the number of the core's lowest logical CPU."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(path.read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def raise_file_limit() -> int:
    """Raise this process's limit of open files, at most to _MAX_FILES. Return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return file_limit()


def file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, _MAX_FILES)
