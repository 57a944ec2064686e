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

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from rl.runtime.sweep_folder import DONE, SweepFolder
from tests.support import launching
from tests.support.answers import Answers, completion
from tests.support.launching import ROOT, Result, begin, ended, nightly

TRAIN = ["offbyone", "train"]
CHOICES = ["env=lockers", "loss=focal", "sampler=one_call", "buffer=varied", "order=frontier"]
SMALL = ["batch_size=16", "group_size=4", "trainer.wait_timeout=400"]
# The only shipped policy that calls tools without a warm start. It does not know these tools, so
# every call is an error, no word is right, and only the entropy bonus moves the weights.
MODEL = ["model=tiny-wiki", "entropy_bonus=0.01"]


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
    ("command", "said"),
    [
        ([*CHOICES, "advantage=quantile", "model=tiny-tools"], "this run cannot start"),
        (["--config-name", "does_focal_help"], "this sweep cannot start"),
    ],
)
def test_the_new_folder_is_accepted_and_the_check_names_only_the_real_mistake(lab, command, said):
    result = lab.run([*TRAIN, *command, "batch_size=17"])
    assert result.status == 2, result.screen
    title, problem = result.screen.strip().splitlines()
    assert title == f"{said}:"
    assert problem.startswith("- batch_size=17 is not a multiple of group_size=16")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["offbyone", "from-toml", "old.toml"], "offbyone train max_steps=3\n"),
        (["python", "use.py"], "my_lab.focal.focal\n"),
        (["offbyone", "plan", "model=tiny"], "usual for all of 0.8 M parameters"),
    ],
)
def test_the_other_commands_and_the_python_functions_work_from_the_wheel(command, said, lab):
    (lab.folder / "old.toml").write_text("max_steps = 3")
    use = "import offbyone; print(offbyone.compose(['loss=focal'])['loss._target_'])"
    (lab.folder / "use.py").write_text(use)
    result = lab.run(command)
    assert result.status == 0, result.screen
    assert said in result.screen


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


@pytest.fixture(scope="module")
def interrupted(lab) -> Result:
    """Return a run that Ctrl-C stopped after its first checkpoints."""
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
    return result


def rollouts(result: Result, step: int) -> list[dict]:
    path = result.folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@nightly
def test_a_run_trains_with_everything_of_the_folder_and_can_be_resumed(interrupted, lab):
    first, second = interrupted.metrics[:2]
    assert "train/focus" in first  # the loss
    assert first["rollout/tool_calls"] == first["rollout/tool_errors"] > 0  # the environment
    assert {rollout["env"] for rollout in rollouts(interrupted, 0)} == {"lockers"}
    assert "order/mean_variance" in first  # the order
    assert second["train/grad_norm"] > 0
    copied = interrupted.folder / "code" / "step_000000" / "my_lab" / "focal.py"
    assert copied.read_text() == (interrupted.folder / "../../my_lab/focal.py").read_text()
    # The sampler ends every turn at its call, and the turns still make one row.
    messages = [m for rollout in rollouts(interrupted, 0) for m in rollout["messages"]]
    assert {len(m.get("tool_calls") or []) for m in messages} == {0, 1}
    assert first["rollout/forks"] == second["rollout/forks"] == 0
    assert first["mismatch/sampled_mean_abs"] < 0.02
    saved = max((interrupted.folder / "checkpoints").glob("step_*"))
    state = json.loads((saved / "state.json").read_text())["rollouts"]
    assert len(state["order"]["variances"]) >= 8  # two batches of four groups
    # The printed command resumes the run.
    (line,) = [line for line in interrupted.screen.splitlines() if "resume=true" in line]
    result = lab.run(line.strip().removeprefix("go on").lstrip(": "), "mine")
    assert result.status == 0, result.screen
    assert [metrics["step"] for metrics in result.metrics] == [0, 1, 2, 3]


@nightly
def test_the_jobs_of_its_sweep_train_one_after_the_other(lab):
    # The sweep's own jobs are checked above. These jobs imitate the expert, which needs no vLLM.
    jobs = ["hydra.sweeper.params=null", "seed=0,1", "loss=sft", "sampler=demonstrations"]
    brief = [*SMALL, "max_steps=1", "model.warm_start=null", "evaluation=none"]
    result = lab.run([*TRAIN, "--config-name", "does_focal_help", *jobs, *brief])
    assert result.status == 0, result.screen
    (sweep,) = (lab.folder / "outputs" / "sweeps").iterdir()
    records = [record for _, record in sorted(SweepFolder(sweep).records().items())]
    assert [(record.state, record.result) for record in records] == [(DONE, None), (DONE, None)]
    # The jobs run one after the other, so all lines of one job are older than those of the other.
    folders = [RunFolder(lab.folder / str(record.folder)) for record in records]
    first, second = ([row["time"] for row in read_metrics(folder)] for folder in folders)
    assert max(first) < min(second) or max(second) < min(first)
    shown = rollouts(Result(0, "", folders[0].path), 0)[0]["messages"]
    assert shown[1]["tool_calls"][0]["function"]["name"] == "open_locker"
