"""offbyone doctor: check this machine, and say what to install or change."""

import os
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from envs.loading import cache_folder
from rl.model.shape import GIB
from rl.placement.installed import device_problem
from rl.runtime.devices import Host, fast_dtype, this_host

_MIN_OPEN_FILES, _MIN_FREE_SPACE = 4096, 5 * GIB
_CONFINE = (
    "from envs.sandbox.confinement import confine; "
    "confine(memory_mb=512, packages=[], allow_without_landlock=False)"
)


def main(_: list[str]) -> str:
    lines = list(checks(this_host()))
    text = "\n".join(f"{name:<14}  {problem or found}" for name, found, problem in lines)
    if any(problem for _, _, problem in lines):
        sys.exit(text)
    return text


def checks(host: Host) -> Iterator[tuple[str, str, str]]:
    """Yield each check as (name, finding, problem). The problem is "" if there is none."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or ""
    header = Path(sysconfig.get_path("include"), "Python.h")
    without_gpu = "missing; only trainer.compile=true needs it"
    for name, found, remedy in (
        ("C++ compiler", compiler, "install g++, or set CXX"),
        ("Python headers", str(header) if header.exists() else "", "install python3-dev"),
    ):
        problem = f"missing, but vLLM compiles kernels on a GPU: {remedy}"
        yield name, found or without_gpu, problem if host.devices and not found else ""
    gpus = f"{len(host.devices)}, driver {host.driver}" if host.devices else ""
    gpus = gpus or f"none: CPU only, fastest in {fast_dtype()}"
    uses_nccl = len(host.devices) > 1
    yield "GPUs", gpus, device_problem(host, needs_vllm=True, uses_nccl=uses_nccl) or ""
    memory = "its size is unknown"
    if host.memory and host.free_memory is not None:
        memory = f"{host.free_memory / GIB:.0f} of {host.memory / GIB:.0f} GiB are free"
    yield "memory", f"{memory}; offbyone plan shows what a run needs", ""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = f"at most {hard}" if hard >= 0 else "no limit"
    advice = f"{limit}: raise the hard limit (docs/troubleshooting.md, open files)"
    yield "open files", limit, advice if 0 <= hard < _MIN_OPEN_FILES else ""
    for name, folder in (("disk", Path.cwd()), ("cache", cache_folder().absolute())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        advice = f"only {free / GIB:.1f} GiB are free in {folder}: free 5 GiB for models"
        yield name, f"{free / GIB:.0f} GiB are free", advice if free < _MIN_FREE_SPACE else ""
    command = [sys.executable, "-c", _CONFINE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    problem = f"env=math-python cannot run on this machine: {reason}" if done.returncode else ""
    yield "sandbox", "Landlock and seccomp confine code that the policy writes", problem
