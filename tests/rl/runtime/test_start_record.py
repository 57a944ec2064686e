"""The command that resumes a run, and how many steps are lost without a checkpoint."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from rl.runtime.folder import RunFolder
from rl.runtime.start_record import resume_advice, resume_command


def a_run(path: Path, **record) -> RunFolder:
    run_folder = RunFolder(path)
    run_folder.path.mkdir(parents=True)
    run_folder.overrides.write_text(yaml.safe_dump(record))
    return run_folder


def test_the_command_repeats_the_start_with_the_same_files(tmp_path):
    command = [".venv/bin/python", "/lab/train.py", "--config-dir", "my sweeps", "-cn", "losses"]
    overrides = ["loss=grpo", "run_name=x", "+env.words=[a,b]", "resume=true"]
    start = {"command": command, "started_in": str(Path.cwd()), "overrides": overrides}
    run_folder = a_run(tmp_path / "x-3", run_name="x-3", **start)
    again = ["loss=grpo", "+env.words=[a,b]", "run_name=x-3", "resume=true"]
    assert shlex.split(resume_command(run_folder)) == [*command, *again]
    elsewhere = a_run(tmp_path / "x", command=["python", "t.py"], started_in="/a b", run_name="x")
    assert resume_command(elsewhere) == "cd '/a b' && python t.py run_name=x resume=true"
    edited = a_run(tmp_path / "y", command=["t", 1], overrides=5, run_name=[7], started_in={})
    assert resume_command(edited) == "t 1 run_name=y resume=true"
    assert resume_command(a_run(tmp_path / "z", command=3)).startswith("python train.py run_name=z")


@pytest.mark.parametrize(
    "name",
    ["it's", 'say "no"', "größer", "a b", "007", "true", "a,b", "q'\"\\'", "x=1", "end\\"],
)
def test_hydra_reads_the_same_run_name_again(name, tmp_path):
    run_folder = a_run(tmp_path / "folder", command=["python", "train.py"], run_name=name)
    *_, override, resume = shlex.split(resume_command(run_folder))
    parsed = OverridesParser.create().parse_override(override)
    assert (parsed.get_key_element(), parsed.value()) == ("run_name", name)
    assert not parsed.is_sweep_override()
    assert resume == "resume=true"


@pytest.mark.parametrize(
    ("done", "saved", "expected"),
    [
        (0, 0, "no step was done: nothing is lost, and run_name can be used again"),
        (7, 0, "7 steps are in no checkpoint (trainer.checkpoint_every): they are lost"),
        (57, 50, "50 of 57 steps are in the last checkpoint, and the others are lost"),
        (50, 50, "50 of 50 steps are in the last checkpoint"),
    ],
)
def test_the_advice_names_saved_and_lost_steps(done, saved, expected, tmp_path):
    run_folder = a_run(tmp_path / "x", run_name="x")
    lines = (json.dumps({"step": step, "train/reward": 0.5}) for step in range(done))
    run_folder.metrics.write_text("".join(f"{line}\n" for line in lines))
    if saved:
        run_folder.checkpoint(saved).mkdir(parents=True)
    advice = resume_advice(run_folder)
    assert advice.splitlines()[0] == expected
    assert ("resume=true" in advice) == bool(done)
    assert ("\ngo on" in advice, "\nagain" in advice) == (bool(saved), bool(done and not saved))
