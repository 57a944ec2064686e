"""The wheel in an environment of its own: `offbyone new` makes a folder, and the folder trains."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import launching
from tests.support.answers import Answers, completion
from tests.support.launching import ROOT, Result, begin, ended, nightly

TRAIN = ["offbyone", "train"]
CHOICES = ["env=lockers", "loss=focal", "sampler=one_call", "buffer=varied", "order=frontier"]
SMALL = ["batch_size=16", "group_size=4", "trainer.wait_timeout=400"]
# The only shipped policy that calls tools without a warm start. It does not know these tools, so
# every call is an error, no word is right, and only the entropy bonus moves the weights.
MODEL = ["model=tiny-wiki", "entropy_bonus=0.01"]
COMPOSE = "import offbyone; print(offbyone.compose(['loss=focal'])['loss._target_'])"


@dataclass
class Lab:
    """The folder that `offbyone new` made, and the environment variables of its user."""

    folder: Path
    environment: dict[str, str]

    def run(self, command: list[str] | str, name: str = "") -> Result:
        process = begin(command, self.folder, self.environment)
        return ended(process, self.folder / "outputs" / name, 300)


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    """Build and install the wheel beside the locked packages, and make a folder with it."""
    home = tmp_path_factory.mktemp("home")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # Build from a copy, because a build leaves files behind that the next build would include.
    unneeded = shutil.ignore_patterns(".*", "outputs", "build", "__pycache__")
    source = shutil.copytree(ROOT, home / "source", ignore=unneeded)
    build = ["wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(home)]
    subprocess.run([*pip, *build], check=True)
    venv.create(home / "venv")
    packages = next((home / "venv").glob("lib/python3*/site-packages"))
    # Python reads no .pth file of a folder that a .pth file names, so the editable install is not
    # found.
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = home.glob("*.whl")
    python = ["--python", str(home / "venv" / "bin" / "python")]
    subprocess.run([*pip, *python, "install", "--no-deps", "-I", str(wheel)], check=True)
    path = os.pathsep.join([str(home / "venv" / "bin"), os.environ["PATH"]])
    environment = {"PATH": path, "OFFBYONE_CACHE": str(home)}
    result = ended(begin(["offbyone", "new", "my-lab"], home, environment), home, 60)
    assert result.status == 0, result.screen
    return Lab(home / "my-lab", environment)


@pytest.mark.slow
def test_its_own_tests_pass_and_every_yaml_of_it_with_them(lab):
    result = lab.run(["python", "-m", "pytest", "-q"])
    assert result.status == 0, result.screen
    assert int(result.screen.rpartition(" passed")[0].split()[-1]) > 50


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ([*TRAIN, *CHOICES, "advantage=quantile", "model=tiny-tools", "batch_size=17"], 2,
         "this run cannot start:\n- batch_size=17 is not a multiple of group_size=16"),
        (["offbyone", "from-toml", "old.toml"], 0, "offbyone train max_steps=3\n"),
        (["python", "-c", COMPOSE], 0, "my_lab.focal.focal\n"),
        (["offbyone", "plan", "model=tiny"], 0, "usual for all of 0.8 M parameters"),
    ],
    ids=["train", "from-toml", "python", "plan"],
)  # fmt: skip
def test_the_commands_and_the_python_functions_work_from_the_wheel(command, status, said, lab):
    (lab.folder / "old.toml").write_text("max_steps = 3")
    result = lab.run(command)
    assert result.status == status, result.screen
    assert said in result.screen
    assert result.screen.count("\n- ") == (status == 2)  # the check names only the real mistake


def test_an_evaluation_in_an_empty_folder_works_from_the_wheel(lab, tmp_path):
    settings = ["env=reverse-text", "num_examples=2", "rollouts_per_example=2", "run_name=asked"]
    with Answers((200, completion("olleh"))).serving() as url:
        asked = ["client=messages", f"client.url={url}", "client.model=any", *settings]
        process = begin(["offbyone", "evaluate", *asked], tmp_path, lab.environment)
        result = ended(process, tmp_path / "outputs" / "asked", 60)
    assert result.status == 0, result.screen
    assert "pass@2" in result.screen
    assert (result.folder / "rollouts.html").stat().st_size > 50_000
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]


@nightly
def test_an_interrupted_run_trained_with_everything_of_the_folder_and_can_be_resumed(lab):
    settings = ["run_name=mine", "max_steps=4", "trainer.checkpoint_every=1"]
    command, folder = [*TRAIN, *CHOICES, *SMALL, *MODEL, *settings], lab.folder / "outputs" / "mine"
    process = begin(command, lab.folder, lab.environment)
    saved = folder / "checkpoints" / "step_000002"
    launching.wait_for(lambda: saved.is_dir() or process.poll() is not None, 300)
    groups = launching.groups_below(process.pid)
    process.send_signal(signal.SIGINT)
    result = ended(process, folder, 60)
    assert result.status == 130, result.screen
    assert launching.wait_for(lambda: not launching.alive(groups), 5), launching.alive(groups)

    first, second = result.metrics[:2]
    assert "train/focus" in first  # the loss
    assert first["rollout/tool_calls"] == first["rollout/tool_errors"] > 0  # the environment
    lines = (folder / "rollouts" / "step_000000.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert {rollout["env"] for rollout in rollouts} == {"lockers"}
    assert "order/mean_variance" in first  # the order
    assert second["train/grad_norm"] > 0
    assert (folder / "code" / "step_000000" / "my_lab" / "focal.py").is_file()
    # The sampler ends every turn at its call, and the turns still make one row.
    messages = [message for rollout in rollouts for message in rollout["messages"]]
    assert {len(message.get("tool_calls") or []) for message in messages} == {0, 1}
    assert first["rollout/forks"] == second["rollout/forks"] == 0
    assert first["mismatch/sampled_mean_abs"] < 0.02
    state = json.loads((max(saved.parent.iterdir()) / "state.json").read_text())["rollouts"]
    assert len(state["order"]["variances"]) >= 8  # two batches of four groups
    # The printed command resumes the run.
    (line,) = [line for line in result.screen.splitlines() if "resume=true" in line]
    result = lab.run(line.strip().removeprefix("go on").lstrip(": "), "mine")
    assert result.status == 0, result.screen
    assert [metrics["step"] for metrics in result.metrics] == [0, 1, 2, 3]
