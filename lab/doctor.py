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
from rl.runtime.devices import Host, this_host

_FEW_FILES, _LITTLE_SPACE = 4096, 5 * GIB
_CONFINE = (
    "from envs.sandbox.confinement import confine; "
    "confine(memory_mb=512, packages=[], allow_without_landlock=False)"
)


def main(arguments: list[str]) -> str:
    """Return one line per check. Exit with status 1 if a check fails."""
    if arguments:
        sys.exit("usage: offbyone doctor")
    lines = list(checks(this_host()))
    width = max(len(name) for name, _, _ in lines)
    text = "\n".join(f"{name:<{width}}  {problem or found}" for name, found, problem in lines)
    if any(problem for _, _, problem in lines):
        sys.exit(text)
    return text


def checks(host: Host) -> Iterator[tuple[str, str, str]]:
    """Yield name, finding and problem ("" if there is none) of each check."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    advice = "DeepSpeed compiles an op at the first start: install g++, or set CXX"
    yield "C++ compiler", compiler or "", "" if compiler else f"missing, and {advice}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    advice = "" if header.exists() else f"{header} is missing: install the package python3-dev"
    yield "Python headers", str(header), advice
    problem = device_problem(host, needs_vllm=True, several=len(host.devices) > 1) or ""
    driver = f"NVIDIA's driver {host.driver}" if host.driver else "runs compute on the CPU"
    yield "GPUs", f"{len(host.devices)}, {driver}", problem
    memory = f"{(host.free_memory or 0) / GIB:.0f} of {(host.memory or 0) / GIB:.0f} GiB are free"
    yield "memory", f"{memory}; offbyone plan shows what a run needs", ""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= hard < _FEW_FILES  # -1 is no limit
    advice = f"at most {hard}: raise the hard limit (docs/troubleshooting.md, open files)"
    yield "open files", "no limit" if hard < 0 else str(hard), advice if few else ""
    for name, folder in (("disk", Path()), ("cache", cache_folder())):
        folder = folder.absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        advice = f"only {free / GIB:.1f} GiB are free in {folder}: checkpoints may not fit"
        yield name, f"{free / GIB:.0f} GiB are free", advice if free < _LITTLE_SPACE else ""
    command = [sys.executable, "-c", _CONFINE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    found = "Landlock and seccomp confine the code of policies"
    yield "sandbox", found, "" if done.returncode == 0 else f"for env=math-python only: {reason}"
