"""Which cores and GPUs this process may use, asked of the system without importing torch."""

import os
from pathlib import Path


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
