"""Check the files of examples/cluster without running them: composition, shell syntax, versions."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from rl.config.rules import rule_problems
from tests.support.composing import REPO, composed

FILES = sorted((REPO / "examples" / "cluster").iterdir())


def shell_of(path: Path) -> str:
    """Return the shell commands of a file."""
    if path.suffix == ".sbatch":
        return path.read_text()
    content = yaml.safe_load(path.read_text())
    return content.get("run") or content["spec"]["entrypoint"]


def overrides_of(path: Path) -> list[str]:
    """Return the overrides that a file passes to train.py; variables get some value."""
    lines = re.sub(r"\\\n", " ", shell_of(path))
    (command,) = re.findall(r"train\.py (cluster=[^&\n]*)", lines)
    return shlex.split(re.sub(r"\$\w+", "some", command))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_has_no_error_of_syntax_and_its_run_composes(path, tmp_path):
    subprocess.run(["bash", "-n"], input=shell_of(path), text=True, check=True)
    config = composed(*overrides_of(path), f"output_dir={tmp_path}")
    assert rule_problems(config) == []
    assert config["cluster"]["gpus"]


def test_the_examples_use_the_pinned_version_of_ray():
    (pinned,) = re.findall(r'"ray==([\d.]+)"', (REPO / "pyproject.toml").read_text())
    (job,) = (yaml.safe_load(path.read_text()) for path in FILES if path.name == "kuberay.yaml")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned
