"""examples/my-lab, copied out of the checkout as a researcher would and worked in from there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.run.folder import RunFolder
from rl.run.metrics import read_metrics
from tests.support.launching import ROOT, Result, stop, wait_for

LIMIT = pytest.mark.timeout(600)
TRAIN = [sys.executable, str(ROOT / "train.py"), "--config-dir", "conf"]
CHOICES = ["env=lockers", "loss=focal", "sampler=one_call", "buffer=varied", "order=frontier"]
SMALL = ["batch_size=16", "group_size=4", "trainer.wait_timeout=400"]
# The one shipped policy that calls tools without a warm start. It knows none of these: every call
# is answered with an error, no word is right, and the entropy bonus alone moves the weights.
MODEL = ["model=tiny-wiki", f"model.path={ROOT}/models/tiny-wiki", "entropy_bonus=0.01"]


@dataclass
class Lab:
    """A copy of the folder, and the environment of somebody who works in it."""

    folder: Path
    environment: dict[str, str]

    def start(self, command: list[str] | str) -> subprocess.Popen:
        return subprocess.Popen(
            command,
            shell=isinstance(command, str),
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: list[str] | str, name: str = "") -> Result:
        process = self.start(command)
        try:
            screen, _ = process.communicate(timeout=300)
        finally:
            stop(process)
        return Result(process.returncode, screen, self.folder / "outputs" / name)


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    home = tmp_path_factory.mktemp("home")
    caches = shutil.ignore_patterns("__pycache__", ".pytest_cache", "outputs")
    shutil.copytree(ROOT / "examples" / "my-lab", home / "my-lab", ignore=caches)
    # This checkout, whichever the interpreter has installed.
    modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": modules, "OFFBYONE_CACHE": str(home)}
    return Lab(home / "my-lab", environment)


def test_its_own_tests_pass_and_every_yaml_of_it_with_them(lab):
    result = lab.run([sys.executable, "-m", "pytest", "-q"])
    assert result.status == 0, result.screen
    assert int(result.screen.rpartition(" passed")[0].split()[-1]) > 50


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*CHOICES, "advantage=quantile", "model=tiny-tools"], "this run cannot start"),
        (["--config-name", "does_focal_help"], "this sweep cannot start"),
    ],
)
def test_from_outside_train_py_finds_nothing_wrong_but_what_is(lab, command, said):
    result = lab.run([*TRAIN, *command, "batch_size=17"])
    assert result.status == 2, result.screen
    title, *problems = result.screen.strip().splitlines()
    assert title == f"{said}:"
    assert len(problems) == 1
    assert problems[0].startswith("- batch_size=17 is no multiple of group_size=16")


@pytest.fixture(scope="module")
def interrupted(lab) -> Result:
    """A run that was stopped by Ctrl-C when it had a checkpoint."""
    settings = ["run_name=mine", "max_steps=6", "trainer.checkpoint_every=1"]
    process = lab.start([*TRAIN, *CHOICES, *SMALL, *MODEL, *settings])
    folder = lab.folder / "outputs" / "mine"
    try:
        saved = folder / "checkpoints" / "step_000002"
        assert wait_for(lambda: saved.is_dir() or process.poll() is not None, 300)
        process.send_signal(signal.SIGINT)
        screen, _ = process.communicate(timeout=60)
    finally:
        stop(process)
    assert process.returncode == 130, screen
    return Result(process.returncode, screen, folder)


def rollouts(result: Result, step: int) -> list[dict]:
    path = result.folder / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@LIMIT
@pytest.mark.server
def test_a_run_trains_with_every_part_of_the_folder(interrupted):
    first, second = interrupted.metrics[:2]
    assert "train/focus" in first  # the loss
    assert first["rollout/tool_calls"] == first["rollout/tool_errors"] > 0  # the environment
    assert {rollout["env"] for rollout in rollouts(interrupted, 0)} == {"lockers"}
    assert "order/mean_variance" in first  # the order
    assert second["train/grad_norm"] > 0
    # A turn that the sampler ended at its call stays a part of one row, and is computed alike.
    assert first["rollout/forks"] == second["rollout/forks"] == 0
    assert first["mismatch/sampled_mean_abs"] < 0.02


@LIMIT
@pytest.mark.server
def test_no_turn_goes_on_behind_its_call(interrupted):
    said = [m for r in rollouts(interrupted, 0) for m in r["messages"] if m["role"] == "assistant"]
    assert any(message.get("tool_calls") for message in said)
    assert all(len(message.get("tool_calls") or []) <= 1 for message in said)


@LIMIT
@pytest.mark.server
def test_what_the_order_learned_is_in_the_checkpoint(interrupted):
    saved = max((interrupted.folder / "checkpoints").glob("step_*"))
    state = json.loads((saved / "state.json").read_text())["rollouts"]
    assert len(state["order"]["variances"]) >= 8  # two batches of four groups


@LIMIT
@pytest.mark.server
def test_it_goes_on_by_the_very_line_that_was_printed(interrupted, lab):
    # In a shell as it was, which has no .venv activated: the line names interpreter and train.py.
    (line,) = [line for line in interrupted.screen.splitlines() if "resume=true" in line]
    result = lab.run(line.strip().removeprefix("go on").lstrip(": "), "mine")
    assert result.status == 0, result.screen
    assert [metrics["step"] for metrics in result.metrics] == [0, 1, 2, 3, 4, 5]


@LIMIT
@pytest.mark.server
def test_its_sweep_trains_and_ends_with_a_table(lab):
    # The jobs of the sweep itself are checked above. These imitate the expert, which needs no vLLM.
    jobs = ["hydra.sweeper.params=null", "seed=0,1", "loss=sft", "sampler=demonstrations"]
    brief = ["max_steps=1", "batch_size=16", "group_size=4", "model.warm_start=null"]
    result = lab.run([*TRAIN, "--config-name", "does_focal_help", *jobs, *brief])
    assert result.status == 0, result.screen
    (summary,) = (lab.folder / "outputs" / "sweeps").glob("*/summary.json")
    (both,) = json.loads(summary.read_text())
    assert (both["seeds"], both["failed"], both["reward"]) == (2, 0, 1.0)
    # One job after the other: the lines of the first are older than those of the second.
    folders = [RunFolder(Path(folder)) for folder in both["folders"]]
    first, second = ([row["time"] for row in read_metrics(folder)] for folder in folders)
    assert max(first) < min(second) or max(second) < min(first)
    shown = rollouts(Result(0, "", Path(both["folders"][0])), 0)[0]["messages"]
    assert shown[1]["tool_calls"][0]["function"]["name"] == "open_locker"
