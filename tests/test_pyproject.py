"""The requirements of pyproject.toml agree with the locks."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_dependency_has_a_lower_bound_that_the_lock_fulfils(device):
    text = (REPO / f"requirements-{device}.lock").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert {one.operator for one in requirement.specifier} <= {">=", "=="}
        assert len(requirement.specifier) == 1, requirement.name
        assert requirement.specifier.contains(pins[requirement.name]), requirement.name


def test_every_pin_has_hashes_that_each_install_requires_and_both_locks_accept_the_same_files():
    pins = []
    for device in ("cpu", "cuda"):
        lines = (REPO / f"requirements-{device}.lock").read_text().splitlines()
        pinned = [line for line in lines if not line.startswith("#")]
        form = r"[\w.-]+==\S+( --hash=sha256:[0-9a-f]{64})+"
        assert all(re.fullmatch(form, line) for line in pinned)
        pins.append({line.split()[0]: sorted(line.split()[1:]) for line in pinned})
    cpu, cuda = pins
    both = cpu.keys() & cuda.keys()
    assert len(both) > 150
    different = {pin.split("==")[0] for pin in both if cpu[pin] != cuda[pin]}
    assert different == {"torch"}  # PyTorch's own index has wheels for CPU, the registry others
    assert set(cpu["torch==2.13.0"]) > set(cuda["torch==2.13.0"])
    lines = (REPO / "Makefile").read_text().splitlines()
    installs = [one for one in lines if "$(PIP)" in one and ("LOCK)" in one or ".lock" in one)]
    assert len(installs) == 4
    assert all("--require-hashes -r" in one for one in installs)


def test_the_source_archive_contains_every_file_that_the_wheel_copies():
    manifest = (REPO / "MANIFEST.in").read_text().split()
    setup = (REPO / "setup.py").read_text()
    copied = re.findall(r'"([\w/.-]+\.md|examples/my-lab|conf|sweeps|models)"', setup)
    copied += [path.name for path in REPO.glob("*.py") if path.name != "setup.py"]
    assert len(copied) > 9
    assert set(copied) <= set(manifest)
