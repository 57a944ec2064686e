"""The requirements of pyproject.toml agree with the locks."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [Requirement(text) for text in PROJECT["dependencies"]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_dependency_has_a_lower_bound_that_the_lock_fulfils(device):
    text = (REPO / f"requirements-{device}.lock").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
    assert REQUIREMENTS
    for requirement in REQUIREMENTS:
        assert {one.operator for one in requirement.specifier} <= {">=", "=="}
        assert len(requirement.specifier) == 1, requirement.name
        assert requirement.specifier.contains(pins[requirement.name]), requirement.name


def test_no_page_or_message_installs_extras_by_the_name_of_another_distribution():
    assert PROJECT["name"] == "offbyone-rl"
    named = re.compile(r"pip install \S*offbyone\[")
    folders = ("rl", "lab", "envs", "losses", "offbyone", "conf", "docs")
    files = [path for folder in folders for path in (REPO / folder).rglob("*.*")]
    texts = {p: p.read_text() for p in files if p.suffix in (".py", ".md", ".yaml")}
    assert not [path for path, text in texts.items() if named.search(text)]
