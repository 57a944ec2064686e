"""Each layer of the sandbox protects by itself."""

import errno
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs.sandbox import confinement
from envs.sandbox.confinement import ALLOWED, MACHINES
from envs.sandbox.sandbox import PROJECT


def python(code):
    """Return what a new interpreter prints that can import this checkout."""
    boot = f"import sys; sys.path.append({PROJECT!r})\n"
    done = subprocess.run(
        [sys.executable, "-ISc", boot + code], capture_output=True, text=True, check=True
    )
    return done.stdout


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


def test_the_filter_cannot_be_replaced_by_a_weaker_one():
    code = """
from envs.sandbox import confinement
from envs.sandbox.confinement import drop_capabilities, apply_seccomp
drop_capabilities()
apply_seccomp()
try:
    apply_seccomp()
except OSError as error:
    print(error)
"""
    assert "Operation not permitted" in python(code)


@pytest.mark.parametrize(
    "flags", ["O_TRUNC", "O_CREAT", "O_ASYNC", "O_WRONLY", "O_RDWR", "O_RDWR | os.O_TMPFILE"]
)
def test_the_filter_alone_refuses_to_open_a_file_for_changes(flags, tmp_path):
    """Without Landlock, because Landlock would hide a flag that the filter misses."""
    file = tmp_path / "file"
    file.write_text("untouched")
    path = tmp_path if "TMPFILE" in flags else file
    code = f"""
import os
from envs.sandbox import confinement
from envs.sandbox.confinement import drop_capabilities, apply_seccomp
drop_capabilities()
apply_seccomp()
print(os.read(os.open({str(file)!r}, os.O_RDONLY), 99))
try:
    os.open({str(path)!r}, os.{flags})
except PermissionError:
    print("refused")
"""
    assert python(code).splitlines() == ["b'untouched'", "refused"]
    assert file.read_text() == "untouched"


def test_machines_and_kernels_without_a_layer_are_noticed(monkeypatch):
    def unknown(*_):
        raise OSError(errno.ENOSYS, "syscall")

    monkeypatch.setattr(confinement, "_call", unknown)
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
