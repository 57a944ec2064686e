"""The command that resumes a run, steps without a checkpoint, and copies of the user's code."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from envs.user_code import ROOT
from rl.runtime.code_copies import changed_code, code_versions, copy_code
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


CISPO = str(ROOT / "losses" / "cispo.py")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A working folder with two modules of the user."""
    lab = tmp_path / "lab"
    (lab / "mine").mkdir(parents=True)
    for name in ("loss", "env"):
        (lab / "mine" / f"{name}.py").write_text(f"{name} = 1\n")
    monkeypatch.chdir(lab)
    return lab


@pytest.fixture
def files(lab):
    own = [str(lab / "mine" / f"{name}.py") for name in ("loss", "env")]
    return [*own, CISPO, str(ROOT / "rl" / "records.py")]


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def test_a_copy_of_the_users_files_shows_which_were_edited_or_deleted(lab, files, run):
    assert changed_code(run) == []  # of a run without copies, nothing is known
    copy_code(run, files)
    start = run.code / "step_000000"
    copies = {str(path.relative_to(start)) for path in start.rglob("*.py")}
    assert copies == {"mine/loss.py", "mine/env.py", "losses/cispo.py"}
    assert (start / "mine/loss.py").read_text() == "loss = 1\n"
    assert changed_code(run) == []
    (lab / "mine/loss.py").write_text("loss = 2\n")
    assert changed_code(run) == ["mine/loss.py"]
    (lab / "mine/env.py").unlink()
    assert changed_code(run) == ["mine/env.py", "mine/loss.py"]
    # A start from the first step replaces all copies.
    copy_code(run, files[:1])
    assert code_versions(run).keys() == {"mine/loss.py"}
    assert changed_code(run) == []


def test_a_data_file_has_changed_if_its_size_or_content_has(lab, files, run):
    data = lab / "data.jsonl"
    for before, after in (("abc", "abd"), ("abc", "abcd")):
        data.write_text(before)
        copy_code(run, files, [str(lab / "*.jsonl"), str(lab / "missing")])
        assert changed_code(run) == []
        data.write_text(after)
        assert changed_code(run) == ["data.jsonl"]
    run.checkpoint(5).mkdir(parents=True)
    copy_code(run, files, [str(data)])  # the resume accepts the new file
    assert changed_code(run) == []
    data.unlink()
    assert changed_code(run) == ["data.jsonl"]
    data.touch()
    copy_code(run, files, [str(lab / "*.jsonl"), str(lab / "*.json"), "later.json"])
    (lab / "more.jsonl").touch()
    (lab / "later.json").touch()  # no pattern matched a file like this at the start
    assert changed_code(run) == [f"{lab}/more.jsonl"]
    (run.code / "data.json").write_text("[1]")
    assert changed_code(run) == []


def test_a_resume_adds_copies_only_of_new_and_changed_code(lab, files, run):
    copy_code(run, files[:1])
    run.checkpoint(5).mkdir(parents=True)
    copy_code(run, files)  # env.py is first imported at this resume
    assert (run.code / "step_000005" / "mine/env.py").is_file()
    run.checkpoint(10).mkdir()
    copy_code(run, files)
    copy_code(run, files[:1])  # env.py is no longer imported
    assert not (run.code / "step_000010").exists()
    (lab / "mine/env.py").write_text("env = 2\n")
    assert changed_code(run) == ["mine/env.py"]
    copy_code(run, files)
    assert changed_code(run) == []
    versions = code_versions(run)
    assert [len(versions[f"mine/{name}.py"]) for name in ("loss", "env")] == [1, 2]


def test_a_file_of_the_user_that_is_named_like_one_of_ours_is_another_file(lab, run):
    mine = lab / "losses" / "cispo.py"
    mine.parent.mkdir()
    mine.write_text("mine = 1\n")
    copy_code(run, [str(mine), CISPO])
    assert changed_code(run) == []
    mine.write_text("mine = 2\n")
    assert changed_code(run) == [str(mine)[1:]]
