"""The examples: the notebook, executed in an event loop as Jupyter does, own-harness, and cluster.

The files of examples/cluster are not run: composition, shell syntax, versions.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl.config.build import build
from rl.config.check import check
from rl.config.rules import RULES
from rl.runtime.folder import RunFolder
from tests.support.composing import composed
from tests.support.launching import ROOT, SCRIPTED, begin, ended, nightly

CLUSTER = sorted((ROOT / "examples" / "cluster").iterdir())
SHORT = '"max_steps=3", "batch_size=16", "group_size=8", "sampler=sync", "model.warm_start=null"'
ENGINE, MISMATCH = (f'"{override}"' for override in SCRIPTED)


@nightly
def test_the_notebook_trains_draws_and_samples(tmp_path):
    changes = [
        f'"max_steps=60"=>{SHORT}, {ENGINE}, {MISMATCH}',
        f'"num_examples=20"=>"num_examples=2", "model.max_tokens=32", {ENGINE}',
    ]
    notebook = str(ROOT / "examples" / "a-run-from-python.ipynb")
    command = [sys.executable, "-m", "tests.support.notebooks", notebook, *changes]
    result = ended(begin(command, tmp_path, {"PYTHONPATH": str(ROOT)}), tmp_path, 500)
    assert result.status == 0, result.screen
    assert result.screen.count("displayed image/png") == 3
    assert "displayed text/plain text/html <Config loss=cispo env=reverse-text" in result.screen
    assert "displayed text/plain text/html <Run " in result.screen
    assert "3 steps, last reward" in result.screen
    evaluation, run = sorted((tmp_path / "outputs").iterdir())
    assert len(RunFolder(evaluation).evaluated.read_text().splitlines()) == 4
    assert os.listdir(RunFolder(run).checkpoints) == ["step_000003"]
    # The command that resumes the run is that of a terminal.
    assert "offbyone\n- train" in RunFolder(run).overrides.read_text()


async def test_own_harness_passes_the_check_and_searches_its_index(monkeypatch, tmp_path):
    home = ROOT / "examples" / "own-harness"
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.chdir(home)
    config = composed("experiment=own-harness", config_dir=home / "conf")
    check({**config, "output_dir": str(tmp_path)})
    env = build(config["env"])()
    (example, *_) = env.examples("train")
    assert "Lake" in example.messages[-1]["content"]
    (search,) = env.tool_specs
    assert search["description"] == "Search the encyclopedia."
    assert list(search["parameters"]["properties"]) == ["query"]  # the index is not the policy's


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


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.name)
def test_an_example_has_no_error_of_syntax_and_its_run_composes(path, tmp_path):
    subprocess.run(["bash", "-n"], input=shell_of(path), text=True, check=True)
    config = composed(*overrides_of(path), f"output_dir={tmp_path}")
    assert [problem for rule in RULES for problem in rule(config)] == []
    assert config["cluster"]["gpus"]


def test_the_examples_use_the_pinned_version_of_ray():
    (pinned,) = re.findall(r'"ray==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    (job,) = (yaml.safe_load(path.read_text()) for path in CLUSTER if path.name == "kuberay.yaml")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned
