"""Memory, GPUs and cores of this machine."""

from pathlib import Path

import pytest

from rl.runtime import devices
from rl.runtime.devices import gpu_memory, this_host, visible_gpus

MIB = 1 << 20


def written(path: Path, **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("_", ".", 1)).write_text(content)
    return path


def test_memory_is_that_of_the_machine_or_of_the_cgroup(tmp_path):
    system = tmp_path / "meminfo"
    system.write_text("MemTotal:  8192 kB\nMemFree:  10 kB\nMemAvailable:  4096 kB\nHugePages: 0\n")
    assert devices._memory(system, tmp_path / "none") == (8 * MIB, 4 * MIB)
    boundless = written(tmp_path / "a", memory_max="max\n", memory_current="5\n")
    assert devices._memory(system, boundless) == (8 * MIB, 4 * MIB)
    group = written(
        tmp_path / "b",
        memory_max=f"{6 * MIB}\n",
        memory_current=f"{5 * MIB}\n",
        memory_stat=f"anon {4 * MIB}\ninactive_file {MIB}\n",
    )
    assert devices._memory(system, group) == (6 * MIB, 2 * MIB)
    assert devices._memory(tmp_path / "no", tmp_path / "no") == (None, None)


def test_the_memory_of_the_smallest_gpu_counts_and_is_unknown_without_an_answer(
    tmp_path, monkeypatch
):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool.write_text("#!/bin/sh\ntest $4 = 0,1 && echo 81559 && echo 24576\n")
    tool.chmod(0o755)
    assert gpu_memory(["0", "1"]) == 24576 * MIB
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_memory(["0"]) is None


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("nvidia0", None, ["0"]), ("nvidiactl", None, []), ("dxg", None, ["0"]), ("", None, []),
     ("nvidia3", "", []), ("nvidia0", "0", ["0"])],
)  # fmt: skip
def test_a_gpu_is_what_the_driver_shows(device, visible, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if device:
        (tmp_path / device).touch()
    assert visible_gpus(tmp_path) == expected


def test_this_machine_has_cores_and_memory(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    host = this_host()
    assert 1 <= host.cores <= host.cpus
    assert host.num_threads == 3
    assert host.memory is not None
    assert host.free_memory is not None
    assert host.memory > host.free_memory > 0
