"""What the supervisor refuses before it touches anything (each test starts a real train.py)."""

import os
from pathlib import Path

import pytest

from rl.config.schema import Run
from rl.run.folder import RunFolder
from rl.run.lock import locked
from rl.run.status import Status
from tests.support.composing import composed
from tests.support.launching import train


def a_run(folder: Path, *overrides: str) -> RunFolder:
    """A folder as a run leaves it that has done two steps and no checkpoint."""
    run_folder = RunFolder(folder)
    run_folder.path.mkdir(parents=True)
    names = [f"output_dir={folder.parent}", f"run_name={folder.name}"]
    Run(**composed(*names, *overrides)).save(run_folder.config)
    run_folder.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    run_folder.private.make()
    run_folder.private.vllm_socket.touch()
    return run_folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overrides", [[], ["resume=true"]])
def test_a_run_that_lives_is_left_alone_by_whoever_comes_second(overrides, tmp_path):
    run_folder = a_run(tmp_path / "live")
    with locked(run_folder):
        before = contents(run_folder.path)
        result = train("run_name=live", *overrides, output_dir=tmp_path)
        assert contents(run_folder.path) == before
    assert result.stderr.startswith("this run cannot start:\n- ")
    assert f"live is running (pid {os.getpid()}): wait for its end, stop it" in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert result.returncode == 2


def test_a_run_that_is_at_its_end_starts_nothing(tmp_path):
    run_folder = a_run(tmp_path / "whole", "max_steps=2")
    (run_folder.checkpoints / "step_000002").mkdir(parents=True)
    Status(run_folder, "trainer.rank0").set("done")
    before = contents(run_folder.path)
    result = train("run_name=whole", "resume=true", "max_steps=2", output_dir=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "already at max_steps=2 of " in result.stdout
    assert "raise max_steps to go on" in result.stdout
    assert "whole: 2 steps" in result.stdout
    assert contents(run_folder.path) == before


def test_an_evaluation_leaves_a_living_one_alone(tmp_path):
    run_folder = RunFolder(tmp_path / "live")
    with locked(run_folder):
        arguments = ["run_name=live", "client=messages", "client.url=http://localhost:1/v1"]
        result = train(*arguments, "client.model=x", output_dir=tmp_path, program="evaluate.py")
    assert f"live is running (pid {os.getpid()})" in result.stderr
    assert result.returncode == 2


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
def test_a_model_that_cannot_be_had_is_refused_and_leaves_nothing(program, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["run_name=r", "model=hf", "model.path=nobody/nothing"]
    result = train(*arguments, output_dir=tmp_path, program=program)
    assert result.stderr.startswith("this run cannot start:\n- cannot get nobody/nothing")
    assert "starting" not in result.stdout
    assert result.returncode == 2
    assert not list(tmp_path.iterdir())


MODEL = ["model=hf", "adapter=none", "model.max_seq_len=64", "model.max_tokens=32"]
BROKEN_LOSS = """
import a_package_of_nobodys
def my_loss(tokens, *, knob: float):
    return -tokens.anchor * tokens.advantages
"""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*MODEL, "model.path=model"], "model holds no tokenizer.json: save the tokenizer there"),
        (["~loss.clip_low", "~loss.clip_high", "loss._target_=broken_loss.my_loss",
          "+loss.knob=1.0"], "loss: broken_loss.my_loss cannot be imported, for"),
        (["~loss.clip_low", "~loss.clip_high", "loss._target_=imitation.my_loss"],
         "imitation.my_loss imitates whatever it is given"),
    ],
    ids=["no tokenizer", "own loss", "own loss in the place of another"],
)  # fmt: skip
def test_what_cannot_start_says_so_in_a_sentence(arguments, sentence, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "broken_loss.py").write_text(BROKEN_LOSS)
    (tmp_path / "imitation.py").write_text("def my_loss(tokens):\n    return -tokens.logprobs\n")
    result = train(*arguments, output_dir=tmp_path)
    assert sentence in result.stderr
    assert result.stderr.startswith("this run cannot start:\n- ")
    assert "Traceback" not in result.stderr
    assert result.returncode == 2


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    result = train(output_dir=tmp_path, OFFBYONE_CACHE=str(tmp_path / "file"))
    assert result.stderr.startswith("this run cannot start:\n- warm starts are kept in ")
    assert "file/warm, which cannot be written (Not a directory): set the" in result.stderr
    assert "OFFBYONE_CACHE to a folder that can" in result.stderr
    assert result.returncode == 2
