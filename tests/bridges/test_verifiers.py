"""Both generations of the verifiers library, each in its own process: they exclude each other.

The *_cases.py files in this folder need the real library, which `make verifiers` installs.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from envs.verifiers.environment import load_adapter
from tests.support.launching import begin, ended

HERE = Path(__file__).parent
REPO = HERE.parents[1]
NEEDS = (REPO, HERE / "packages")
README = (REPO / "README.md").read_text()
SCRIPTED = "inference._target_=scripted_vllm.ScriptedVLLM sampler=sync sync.max_mismatch=1e9"

pytestmark = pytest.mark.timeout(900)


def paths_of(generation, *further) -> str:
    """Return PYTHONPATH with this generation of the library; skip the test if it is missing."""
    library = REPO / ".venv" / f"verifiers-{generation}"
    if not library.exists():
        pytest.skip(f"{library.name} is not installed for the tests: make verifiers")
    return os.pathsep.join(map(str, (library, *NEEDS, *further)))


@pytest.mark.parametrize("generation", ["v1", "classic"])
def test_the_cases_hold_with_the_real_library(generation, tmp_path):
    env = {**os.environ, "PYTHONPATH": paths_of(generation), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tmp_path / 'cases'}"]
    command += [str(HERE / f"{direction}_cases.py") for direction in ("import", "export")]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


def test_without_the_library_the_bridge_says_what_to_install():
    if "verifiers" in sys.modules or find_spec("verifiers"):
        pytest.skip("the library is installed in this very environment")
    with pytest.raises(ValueError, match=r"owner/x needs .*`make verifiers`, then set PYTHONPATH"):
        load_adapter("owner/x", {})


@pytest.mark.slow
@pytest.mark.server
def test_the_readmes_command_trains_on_a_taskset(tmp_path):
    paths = paths_of("v1", REPO / "tests" / "support")
    (printed,) = [line for line in README.splitlines() if "train.py env=verifiers" in line]
    command = printed.replace("python", sys.executable, 1).replace("owner/name", "letter-tasks")
    command = command.replace("env.num_train=1000", "env.num_train=8")
    short = f"{SCRIPTED} max_steps=1 batch_size=4 group_size=2 output_dir={tmp_path} run_name=r"
    environment = {"PYTHONPATH": paths, "OFFBYONE_CACHE": str(tmp_path / "cache")}
    result = ended(begin(f"{command.strip()} {short}", REPO, environment), tmp_path / "r")
    assert result.status == 0, result.screen
    assert result.metrics[0]["rollout/errors"] == 0
    assert 0 <= result.metrics[0]["reward/letters"] <= 1
