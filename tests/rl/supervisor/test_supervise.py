"""What the supervisor refuses before it writes anything (each test starts a real train.py)."""

import os
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config.schema import Run
from rl.runtime.folder import RunFolder
from rl.runtime.lock import locked
from rl.runtime.status import Status
from rl.supervisor.supervise import _is_complete
from tests.support.composing import REPO, composed
from tests.support.launching import train
from tests.support.tiny_policy import model_folder


def a_run(folder: Path, *overrides: str) -> RunFolder:
    """Return a folder with two steps and no checkpoint."""
    run_folder = RunFolder(folder)
    run_folder.path.mkdir(parents=True)
    names = [f"output_dir={folder.parent}", f"run_name={folder.name}"]
    Run.of(composed(*names, *overrides)).save(run_folder.config)
    run_folder.metrics.write_text('{"step": 0}\n{"step": 1}\n')
    run_folder.private.make()
    run_folder.private.vllm_socket.touch()
    return run_folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overrides", [[], ["resume=true"]])
def test_a_second_supervisor_leaves_a_running_run_alone(overrides, tmp_path):
    run_folder = a_run(tmp_path / "live")
    with locked(run_folder):
        before = contents(run_folder.path)
        result = train("run_name=live", *overrides, output_dir=tmp_path)
        assert contents(run_folder.path) == before
    assert result.stderr.startswith("this run cannot start:\n- ")
    assert f"live is used by process {os.getpid()}: wait until it ends, stop it" in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert result.returncode == 2


@pytest.mark.parametrize("end", ["max_steps=2", 'stop_when="step > 0"'])
def test_a_finished_run_starts_nothing_when_resumed_and_loses_only_its_sockets(end, tmp_path):
    run_folder = a_run(tmp_path / "whole", end)
    (run_folder.checkpoints / "step_000002").mkdir(parents=True)
    Status(run_folder, "trainer.rank0").set("done")
    before = {p: c for p, c in contents(run_folder.path).items() if p.parent.name != "sockets"}
    result = train("run_name=whole", "resume=true", end, output_dir=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    key = end.partition("=")[0]
    assert f"already at {end.replace(chr(34), '')} of " in result.stdout
    assert f"change {key} to continue" in result.stdout
    assert "whole: 2 steps" in result.stdout
    run_folder.lock.unlink()
    assert not run_folder.private.path.exists()
    assert contents(run_folder.path) == before


def test_a_run_is_complete_only_if_a_checkpoint_has_the_step_that_fulfils_stop_when(tmp_path):
    run_folder = a_run(tmp_path / "whole", 'stop_when="step > 0"')
    Status(run_folder, "trainer.rank0").set("done")
    for num_saved in (1, 2):
        run_folder.checkpoint(num_saved).mkdir(parents=True)
        assert _is_complete(Run.load(run_folder.config), run_folder) == (num_saved == 2)


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
def test_a_model_that_cannot_be_fetched_is_refused_and_leaves_no_files(
    program, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["run_name=r", "model=hf", "model.path=nobody/nothing"]
    result = train(*arguments, output_dir=tmp_path, program=program)
    assert result.stderr.startswith("this run cannot start:\n- cannot get nobody/nothing")
    assert "starting" not in result.stdout
    assert result.returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_tokenizer_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ["model=hf", "adapter=none", "model.max_seq_len=64", "model.max_tokens=32"]
    result = train(*model, "model.path=model", output_dir=tmp_path)
    assert "model contains no tokenizer.json: save the" in result.stderr
    assert result.stderr.startswith("this run cannot start:\n- ")
    assert "Traceback" not in result.stderr
    assert result.returncode == 2


def test_a_model_with_a_chat_format_of_its_own_is_refused_before_vllm_starts(tmp_path):
    model = model_folder(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    (model / "chat_template.jinja").write_text("{{ messages }} <function=f>")
    sizes = ["adapter=none", "model.max_seq_len=64", "model.max_tokens=32"]
    result = train("model=hf", "model.path=model", "run_name=r", *sizes, output_dir=tmp_path)
    assert result.stderr.startswith("this run cannot start:\n- model.renderer=auto does not know")
    assert "use client=tokens, which takes the model's own chat template, or set" in result.stderr
    assert result.returncode == 2
    assert not (tmp_path / "r").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    result = train(output_dir=tmp_path, OFFBYONE_CACHE=str(tmp_path / "file"))
    assert result.stderr.startswith("this run cannot start:\n- the cache of warm starts, ")
    assert "file/warm, is not writable (Not a directory): set the" in result.stderr
    assert "OFFBYONE_CACHE to a writable folder" in result.stderr
    assert result.returncode == 2


def test_a_wrong_loss_ends_the_engine_that_has_started_and_does_no_step(tmp_path):
    (tmp_path / "wrong.py").write_text("def mine(tokens):\n    return -tokens.logprobs\n")
    result = train(
        *("run_name=r", "model.warm_start=null", "loss._target_=wrong.mine"),
        *("~loss.clip_low", "~loss.clip_high"),
        *("inference._target_=scripted_vllm.ScriptedVLLM", "sampler=sync"),
        output_dir=tmp_path,
        PYTHONPATH=str(REPO / "tests" / "support"),
        OFFBYONE_CACHE=str(tmp_path / "cache"),
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("this run cannot start:\n- loss: wrong.mine returned a Tensor")
    assert result.stderr.endswith(f"({tmp_path}/wrong.py, line 1)\n")
    assert not (tmp_path / "r").exists()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(tmp_path).encode() in command]
