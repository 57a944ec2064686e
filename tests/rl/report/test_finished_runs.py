"""How to go on with a run: a command that works as typed, and what is lost without a checkpoint."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from rl.report.finished_runs import how_to_go_on, resume_command
from rl.run.folder import RunFolder


def a_run(path: Path, **record) -> RunFolder:
    run_folder = RunFolder(path)
    run_folder.path.mkdir(parents=True)
    run_folder.overrides.write_text(yaml.safe_dump(record))
    return run_folder


def test_it_is_started_as_it_was_with_the_same_files(tmp_path):
    command = [".venv/bin/python", "/lab/train.py", "--config-dir", "my sweeps", "-cn", "losses"]
    run_folder = a_run(
        tmp_path / "x-3",
        command=command,
        started_in=str(Path.cwd()),
        run_name="x-3",
        overrides=["loss=grpo", "run_name=x", "+env.words=[a,b]", "resume=true"],
    )
    assert shlex.split(resume_command(run_folder)) == [
        *(*command, "loss=grpo", "+env.words=[a,b]", "run_name=x-3", "resume=true")
    ]


def test_from_elsewhere_it_goes_there_first(tmp_path):
    run_folder = a_run(tmp_path / "x", command=["python", "t.py"], started_in="/a b", run_name="x")
    assert resume_command(run_folder) == "cd '/a b' && python t.py run_name=x resume=true"


@pytest.mark.parametrize(
    "name",
    ["it's", 'say "no"', "größer", "a b", "007", "true", "null", "a,b", "[x]", "q'\"\\'", "x=1",
     "below/x", "back\\slash", "日本", "a:b", "end\\", "(1)"],
)  # fmt: skip
def test_whatever_a_run_is_called_hydra_reads_the_same_name_again(name, tmp_path):
    run_folder = a_run(tmp_path / "folder", command=["python", "train.py"], run_name=name)
    *_, override, resume = shlex.split(resume_command(run_folder))
    parsed = OverridesParser.create().parse_override(override)
    assert (parsed.get_key_element(), parsed.value()) == ("run_name", name)
    assert not parsed.is_sweep_override()
    assert resume == "resume=true"


def steps(run_folder: RunFolder, done: int, saved: int = 0) -> str:
    lines = (json.dumps({"step": step, "train/reward": 0.5}) for step in range(done))
    run_folder.metrics.write_text("".join(f"{line}\n" for line in lines))
    if saved:
        run_folder.checkpoint(saved).mkdir(parents=True)
    return how_to_go_on(run_folder)


@pytest.mark.parametrize(
    ("done", "saved", "sentence"),
    [
        (0, 0, "no step was done: nothing is lost, and the name is free"),
        (7, 0, "its 7 steps are in no checkpoint (trainer.checkpoint_every): they are lost"),
        (57, 50, "50 of its 57 steps are in the last checkpoint; 7 are lost"),
        (50, 50, "all of its 50 steps are in the last checkpoint"),
    ],
)
def test_what_is_lost_is_said(done, saved, sentence, tmp_path):
    said = steps(a_run(tmp_path / "x", run_name="x"), done, saved)
    assert said.splitlines()[0] == sentence
    assert ("resume=true" in said) == bool(done)


def test_the_command_to_go_on_keeps_the_overrides_and_quotes_them(tmp_path):
    overrides = ["+env.words=[a,b]", "seed=0", "run_name=x", "resume=true"]
    assert resume_command(a_run(tmp_path / "a run", overrides=overrides)) == (
        "python train.py '+env.words=[a,b]' seed=0 'run_name=a run' resume=true"
    )
