"""Memory, GPUs and cores of this machine."""

import os
from pathlib import Path

import pytest

from rl.runtime import devices
from rl.runtime.devices import fast_dtype, min_gpu_memory, this_host, visible_cpus, visible_gpus

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
    used = {"memory_current": f"{5 * MIB}\n", "memory_stat": f"anon 9\ninactive_file {MIB}\n"}
    group = written(tmp_path / "b", memory_max=f"{6 * MIB}\n", **used)
    assert devices._memory(system, group) == (6 * MIB, 2 * MIB)
    larger = written(tmp_path / "c", memory_max=f"{9 * MIB}\n", memory_current=f"{MIB}\n")
    assert devices._memory(system, larger) == (8 * MIB, 4 * MIB)
    assert devices._memory(tmp_path / "no", tmp_path / "no") == (None, None)
    system.write_text("MemTotal:  8192 kB\n")
    assert devices._memory(system, larger) == (9 * MIB, 8 * MIB)


H100 = "0, GPU-5d1f, 81559, 580.65.06, Disabled"
TWO = f"{H100}\n1, GPU-77aa, 24576, 580.65.06, [N/A]"
SPLIT = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d1f)
  MIG 3g.40gb     Device  0: (UUID: MIG-a1)
  MIG 1g.10gb     Device  1: (UUID: MIG-b2)"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Return a function that installs an nvidia-smi with these answers on PATH."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(query: str, listing: str = "", status: int = 0) -> None:
        folder = tmp_path / f"bin{len([*tmp_path.iterdir()])}"
        script = '#!/bin/sh\n[ "$1" = -L ] && file=listing || file=query\n/bin/cat '
        tool = {"nvidia-smi": f"{script}{folder}/$file\nexit {status}\n"}
        written(folder, query=f"{query}\n", listing=f"{listing}\n", **tool)
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        devices.gpus_of_driver.cache_clear()

    yield install
    devices.gpus_of_driver.cache_clear()


def test_the_memory_of_the_smallest_gpu_counts_and_is_unknown_without_an_answer(nvidia_smi):
    nvidia_smi(TWO)
    assert min_gpu_memory(["0", "1"]) == min_gpu_memory(["0", "GPU-77"]) == 24576 * MIB
    assert min_gpu_memory(["0"]) == min_gpu_memory(["GPU-5d1f"]) == 81559 * MIB
    assert min_gpu_memory(["7"]) is min_gpu_memory(["0", "7"]) is None  # there is no GPU 7
    nvidia_smi(TWO.replace("24576", "[N/A]"))
    assert min_gpu_memory(["0", "1"]) is None
    nvidia_smi("", status=9)
    assert min_gpu_memory(["0"]) is None


def test_a_container_with_one_gpu_of_the_host_calls_it_0_as_cuda_does(nvidia_smi, tmp_path):
    (tmp_path / "nvidia3").touch()
    nvidia_smi(H100)
    assert visible_gpus(tmp_path) == ["0"]
    assert (this_host().devices, this_host().driver) == (("0",), "580.65.06")
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the driver", status=9)
    assert visible_gpus(tmp_path) == ["0"]
    nvidia_smi(f"{TWO}\nWARNING: infoROM is corrupted")
    assert visible_gpus(tmp_path) == ["0"]


def test_partitions_of_a_gpu_are_named_by_their_uuid(nvidia_smi, monkeypatch):
    nvidia_smi(TWO.replace("Disabled", "Enabled"), SPLIT)
    assert visible_gpus() == ["1", "MIG-a1", "MIG-b2"]
    assert min_gpu_memory(visible_gpus()) == 10 * 10**9
    for listed in ("MIG-a1", "GPU-5d"):  # the driver does not list the divided GPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert visible_gpus() == [listed]
    assert min_gpu_memory(["MIG-a1"]) == 40 * 10**9
    nvidia_smi(H100.replace("Disabled", "Enabled"), SPLIT)  # a machine with one GPU, divided
    assert this_host().driver == "580.65.06"


def test_cuda_ignores_an_unknown_entry_and_all_after_it(nvidia_smi, monkeypatch):
    nvidia_smi(TWO)
    for listed, visible in (
        *(("0,-1,1", ["0"]), ("0,7,1", ["0"]), ("1, GPU-5d", ["1", "GPU-5d"])),
        *(("GPU-none,0", []), ("", [])),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert visible_gpus() == visible, listed


@pytest.mark.parametrize(
    ("files", "listed", "expected"),
    [("nvidiactl", None, []), ("dxg", None, ["0"]), ("", "0", []),
     ("nvidia0 nvidia10 nvidia2 nvidiactl", None, ["0", "1", "2"]),
     ("nvidia0 nvidia10 nvidia2 nvidiactl", "2, GPU-abc", ["2", "GPU-abc"])],
)  # fmt: skip
def test_without_nvidia_smi_a_gpu_is_a_file_of_the_driver(
    files, listed, expected, tmp_path, monkeypatch
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    written(tmp_path, **dict.fromkeys(files.split(), ""))
    assert visible_gpus(tmp_path) == expected


def test_the_limit_of_open_files_is_raised_as_far_as_allowed(monkeypatch):
    limits = []
    monkeypatch.setattr(devices.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(devices.resource, "setrlimit", lambda _, new: limits.append(new))
    for soft, hard, limit, is_raised in (
        *[(1024, 4096, 4096, True), (4096, 4096, 4096, False)],
        *[(1024, -1, 65536, True), (-1, -1, 65536, False)],  # -1: no limit
        (65537, 1 << 20, 65536, False),
    ):
        limits[:] = [(soft, hard)]
        assert devices.raise_file_limit() == limit
        assert limits[1:] == [(limit, hard)] * is_raised


def test_this_machine_has_cores_and_memory(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert this_host().num_threads is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    host = this_host()
    assert 1 <= host.cores <= host.cpus
    assert set(visible_cpus()) == os.sched_getaffinity(0)
    assert host.num_threads == 3
    assert (host.memory or 0) > (host.free_memory or 0) > 0
    # A core has the number of its lowest logical CPU.
    for siblings, core in (("2-3", 2), ("1,5", 1), ("6", 6), ("", 5)):
        monkeypatch.setattr(Path, "read_text", lambda _, siblings=siblings: siblings)
        assert devices.core_of(5) == core


def test_a_cpu_without_bfloat16_instructions_trains_in_float32(tmp_path, monkeypatch):
    gpus, file = [], tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    assert fast_dtype(file) == "bfloat16"  # there is no such file
    for flags, dtype in (
        ("flags\t\t: avx2 avx512f avx512dq avx512bw avx512vl", "bfloat16"),
        ("flags\t\t: avx2 avx_vnni avx_ne_convert", "bfloat16"),
        ("Features\t: fp asimd asimddp sve bf16 i8mm", "bfloat16"),
        ("flags\t\t: fpu sse avx avx2 fma f16c", "float32"),
    ):
        file.write_text(f"model name\t: a CPU\n{flags}\n")
        assert fast_dtype(file) == dtype, flags
    gpus.append("0")
    assert fast_dtype(file) == "bfloat16"
