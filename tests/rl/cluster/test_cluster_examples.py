"""The files in examples/cluster are never run here, so what can be known without is checked."""

import os
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
    """What a file has a shell do."""
    if path.suffix == ".sbatch":
        return path.read_text()
    content = yaml.safe_load(path.read_text())
    return content.get("run") or content["spec"]["entrypoint"]


def overrides_of(path: Path) -> list[str]:
    """What a file starts train.py with; a variable of the shell has some value."""
    lines = re.sub(r"\\\n", " ", shell_of(path))
    (command,) = re.findall(r"train\.py (cluster=[^&\n]*)", lines)
    return shlex.split(re.sub(r"\$\w+", "some", command))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_run_of_an_example_composes_and_is_right(path, tmp_path):
    config = composed(*overrides_of(path), f"output_dir={tmp_path}")
    assert rule_problems(config) == []
    assert config["cluster"]["gpus"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_shell_of_an_example_has_no_error_of_syntax(path):
    subprocess.run(["bash", "-n"], input=shell_of(path), text=True, check=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_modules_that_an_example_starts_exist(path):
    for module in re.findall(r"-m (rl\.\w+)", path.read_text()):
        assert (REPO / module.replace(".", "/") / "__main__.py").exists()


def test_tasks_of_srun_that_share_a_node_have_a_gpu_each():
    """For steps that overlap share them: each would be given the first."""
    steps = re.sub(r"\\\n *", "", (REPO / "examples" / "cluster" / "slurm-srun.sbatch").read_text())
    tasks = re.findall(r"^on .*--ntasks=8 .*'(.*)' \"\$run\"$", steps, re.MULTILINE)
    assert len(tasks) == 2
    told = 'echo "$CUDA_VISIBLE_DEVICES $LOCAL_RANK $*"; exit; '
    for number in ("0", "5"):
        env = {"SLURM_LOCALID": number, "SLURM_PROCID": number, "PATH": os.environ["PATH"]}
        ran = [
            subprocess.run(
                ["bash", "-c", task.replace("exec .venv/bin/python", f"bash -c '{told}' x"), "run"],
                env=env, capture_output=True, text=True, check=True,
            ).stdout.split()
            for task in tasks
        ]  # fmt: skip
        assert ran[0] == [number, "-m", "rl.inference", "run", "--replica", number]
        assert ran[1] == [number, "-m", "rl.trainer", "run"]


def test_the_examples_use_the_pinned_version_of_ray():
    (pinned,) = re.findall(r'"ray==([\d.]+)"', (REPO / "pyproject.toml").read_text())
    (job,) = (yaml.safe_load(path.read_text()) for path in FILES if path.name == "kuberay.yaml")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == pinned
