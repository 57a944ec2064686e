"""Each layer of the sandbox protects by itself; a kernel without Landlock must be accepted."""

import asyncio
import errno
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs.maths import grading
from envs.maths.calculations import Calculations
from envs.maths.environment import Maths
from envs.maths.grading import Grader
from envs.maths.math_python import MathPython
from envs.mixture import Mixture
from envs.sandbox import confinement, sandbox
from envs.sandbox.confinement import ALLOWED, MACHINES
from envs.sandbox.sandbox import PROJECT, Limits
from tests.support.sandboxes import OPTIONS, close, interpreters, make, settled


def python(code):
    """Return what a new interpreter prints that can import this checkout."""
    boot = f"import sys; sys.path.append({PROJECT!r})\n"
    python = [sys.executable, "-ISc", boot + code]
    return subprocess.run(python, capture_output=True, text=True, check=True).stdout


def test_without_landlock_python_itself_refuses_to_read_other_files(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("x")
    code = f"""
from envs.sandbox import confinement
from envs.sandbox.confinement import restrict_reading, readable_paths
restrict_reading(readable_paths([]))
import ctypes, decimal, hashlib, io, os, pathlib
attempts = [
    lambda: open({str(outside)!r}),
    lambda: os.open({str(outside)!r}, 0),
    lambda: pathlib.Path("/proc/self/environ").read_bytes(),
    lambda: io.FileIO(os.path.dirname(os.__file__) + "/../../../../../../../../etc/passwd"),
    lambda: os.listdir("/"),
    lambda: list(os.scandir({str(outside.parent)!r})),
    lambda: ctypes.CDLL(None),
]
for attempt in attempts:
    try:
        print("read", attempt())
    except PermissionError:
        print("refused")
print(len(os.listdir(os.path.dirname(os.__file__))) > 100)
"""
    assert python(code).split() == ["refused"] * 7 + ["True"]


def test_the_filter_alone_refuses_to_open_a_file_for_changes_and_cannot_be_replaced(tmp_path):
    """Without Landlock, because Landlock would hide a flag that the filter misses."""
    file = tmp_path / "file"
    file.write_text("untouched")
    code = f"""
import os
from envs.sandbox import confinement
from envs.sandbox.confinement import drop_capabilities, apply_seccomp
drop_capabilities()
apply_seccomp()
print(os.read(os.open({str(file)!r}, os.O_RDONLY), 99))
flags = [os.O_TRUNC, os.O_CREAT, os.O_ASYNC, os.O_WRONLY, os.O_RDWR]
attempts = [lambda flag=flag: os.open({str(file)!r}, flag) for flag in flags]
attempts.append(lambda: os.open({str(tmp_path)!r}, os.O_RDWR | os.O_TMPFILE))
for attempt in [*attempts, apply_seccomp]:
    try:
        print("not refused", attempt())
    except PermissionError:
        print("refused")
"""
    assert python(code).splitlines() == ["b'untouched'"] + ["refused"] * 7
    assert file.read_text() == "untouched"


def test_machines_and_kernels_without_a_layer_are_noticed(monkeypatch):
    def unknown(*_):
        raise OSError(errno.ENOSYS, "syscall")

    monkeypatch.setattr(confinement, "_call_libc", unknown)
    assert confinement.apply_landlock([]) is False
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="the sandbox supports x86_64 and aarch64, but not riscv64"):
        confinement.apply_seccomp()


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_system_calls_have_the_numbers_of_the_kernel(machine):
    if not HEADERS[machine].exists():
        pytest.skip("needs the kernel's headers (linux-libc-dev)")
    column, _, partly = MACHINES[machine]
    rows = [row.split() for row in ALLOWED.split(",")]
    ours = {row[0]: int(row[column]) for row in rows if row[column] != "-"} | partly
    defined = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    kernels = dict(re.findall(defined, HEADERS[machine].read_text()))
    kernels["newfstatat"] = kernels.get("newfstatat", kernels.get("fstatat"))
    assert {name: int(kernels[name]) for name in ours} == ours


QUESTIONS = Calculations(kinds=["sum"], digits=2, num_train=2, num_eval=2)
GRADER = {"workers": 1, "cpu_seconds": 5, "memory_mb": 1024}
MATHS = {"name": "maths", "questions": QUESTIONS, "instruction": "", "reward_weights": {}}


def grader(**changes):
    return Grader(**{**GRADER, "allow_without_landlock": False, **changes})


def math_python(grader, **changes):
    limits = Limits(**{**OPTIONS, **changes})
    return MathPython(**MATHS, grader=grader, max_turns=2, max_concurrent=2, sandbox=limits)


@pytest.fixture
def old_kernel(monkeypatch):
    forget = "from envs.sandbox import confinement as c; c.apply_landlock = lambda paths: False"
    boot = sandbox.BOOT.replace("from envs", f"{forget}; from envs", 1)
    monkeypatch.setattr(sandbox, "BOOT", boot)


def test_without_landlock_sandboxes_and_grading_work_only_if_the_configuration_accepts_it(
    old_kernel,
):
    with pytest.raises(RuntimeError, match=r"no Landlock.*allow_without_landlock=true"):
        asyncio.run(make().run("1"))
    accepted = grader(allow_without_landlock=True)
    assert asyncio.run(accepted.means_same("x + 1", "1 + x")) is True
    close(accepted)
    with pytest.raises(RuntimeError, match="no Landlock"):
        asyncio.run(grader().means_same("x + 1", "1 + x"))


def test_an_environment_that_runs_code_tries_a_sandbox_before_the_run(old_kernel):
    before = interpreters()
    accepted = grader(allow_without_landlock=True)
    for env in (Maths(**MATHS, grader=grader()), math_python(accepted)):
        with pytest.raises(ValueError, match="no Landlock"):
            env.check_machine()
        with pytest.raises(ValueError, match="no Landlock"):
            Mixture(envs={"maths": env}, weights={"maths": 1.0}).check_machine()
    math_python(accepted, allow_without_landlock=True).check_machine()
    assert settled(before)  # the processes are killed without waiting


def test_a_grader_whose_library_cannot_be_loaded_is_noticed_before_the_run(monkeypatch):
    monkeypatch.setattr(grading, "_PRELOAD", "import math_verify_of_another_world")
    with pytest.raises(ValueError, match=r"No module named 'math_verify_of_another_world'"):
        Maths(**MATHS, grader=grader()).check_machine()
