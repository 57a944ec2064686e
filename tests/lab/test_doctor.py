"""offbyone doctor: checks of the machine."""

import pytest

from lab import doctor
from rl.runtime.devices import Host, this_host


def found(host: Host) -> dict[str, str]:
    return {name: problem for name, _, problem in doctor.checks(host)}


def test_this_machine_is_described_line_by_line(capsys):
    problems = found(this_host())
    assert list(problems) == [
        *("C++ compiler", "Python headers", "GPUs", "memory", "open files", "disk", "cache"),
        "sandbox",
    ]
    assert not problems["C++ compiler"]
    assert not problems["Python headers"]


def test_each_problem_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("OFFBYONE_CACHE", str(tmp_path / "not" / "made"))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (100, 256))
    monkeypatch.setattr(doctor, "_MIN_FREE_SPACE", 1 << 60)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho details >&2\necho no Landlock >&2\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(doctor.sys, "executable", str(python))
    problems = found(Host(devices=("0",)))
    assert problems["sandbox"] == "env=math-python cannot run on this machine: no Landlock"
    host = Host(devices=("0", "1"), driver="550.1")
    assert ("GPUs", "2, driver 550.1") in [check[:2] for check in doctor.checks(host)]
    assert "set CXX" in problems["C++ compiler"]
    assert "install python3-dev" in problems["Python headers"]
    assert "" == found(Host())["C++ compiler"] == found(Host())["Python headers"]
    assert "make install DEVICE=cuda" in problems["GPUs"]  # the CPU build beside a GPU
    assert problems["open files"].startswith("at most 256: raise the hard limit")
    assert str(tmp_path / "not" / "made") in problems["cache"]
    with pytest.raises(SystemExit, match="raise the hard limit"):
        doctor.main([])
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (100, -1))
    assert ("open files", "no limit", "") in list(doctor.checks(Host()))


def test_memory_of_unknown_size_is_not_said_to_be_none():
    memory = {name: found for name, found, _ in doctor.checks(Host())}["memory"]
    assert memory.startswith("its size is unknown; ")
