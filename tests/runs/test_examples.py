"""The examples: the notebook, executed in an event loop as Jupyter does, own-harness, and cluster.

The files of examples/cluster are not run: composition, shell syntax, versions.
"""

import os
import re
import shlex
import subprocess
import sys

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
    assert "displayed text/plain text/html <Run " in result.screen
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
    assert list(search["parameters"]["properties"]) == ["query"]  # the index is not the policy's


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.name)
def test_a_file_of_a_cluster_has_no_error_of_syntax_and_its_run_composes(path, tmp_path):
    text = path.read_text()
    content = yaml.safe_load(text) if path.suffix == ".yaml" else {"run": text}
    shell = content.get("run") or content["spec"]["entrypoint"]
    if path.name == "kuberay.yaml":
        (pinned,) = re.findall(r'"ray==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
        assert content["spec"]["rayClusterSpec"]["rayVersion"] == pinned
    subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
    (command,) = re.findall(r"train\.py (cluster=[^&\n]*)", shell.replace("\\\n", " "))
    overrides = shlex.split(re.sub(r"\$\w+", "some", command))  # variables get some value
    config = composed(*overrides, f"output_dir={tmp_path}")
    assert [problem for rule in RULES for problem in rule(config)] == []
    assert config["cluster"]["gpus"]
