"""What the supervisor refuses before it writes anything.

The tests start a real train.py, or call `supervise` in this process (`refused`).
"""

import json
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config.learned import Learned
from rl.config.schema import ConfigError, Run, seconds_of
from rl.dry_call.learn import run_with_facts
from rl.model.shape import read_sizes
from rl.runtime.code_copies import changed_code
from rl.runtime.commit import commit_of
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.files import json_line
from rl.runtime.folder import RunFolder
from rl.runtime.lock import locked
from rl.runtime.metrics import MetricsFile
from rl.runtime.status import Status
from rl.runtime.stop_request import Stopped, StopRequest
from rl.supervisor import time_limit
from rl.supervisor.resolve import resolve
from rl.supervisor.supervise import _end_run, _is_complete, _Launch, supervise
from rl.supervisor.time_limit import TimeLimit, seconds_to_save
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
    run_folder.private.vllm_socket_of("inference").touch()
    return run_folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_supervisor_leaves_a_running_run_alone(tmp_path):
    run_folder = a_run(tmp_path / "live")
    with locked(run_folder):
        before = contents(run_folder.path)
        result = train("run_name=live", "resume=true", output_dir=tmp_path)
        assert contents(run_folder.path) == before
    assert result.stderr.startswith("this run cannot start:\n- ")
    assert f"live is used by process {os.getpid()}: wait until it ends, stop it" in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert result.returncode == 2


def test_a_finished_run_starts_nothing_when_resumed_and_loses_only_its_sockets(tmp_path):
    end = 'stop_when="step > 0"'
    run_folder = a_run(tmp_path / "whole", end)
    (run_folder.checkpoints / "step_000002").mkdir(parents=True)
    Status(run_folder, "trainer.rank0").set("done")
    before = {p: c for p, c in contents(run_folder.path).items() if p.parent.name != "sockets"}
    again = ("run_name=whole", "resume=true", "model.dtype=bfloat16", end)
    result = train(*again, output_dir=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "whole has reached stop_when=step > 0: " in result.stdout
    assert "change stop_when to continue" in result.stdout
    assert "whole: 2 steps" in result.stdout
    run_folder.lock.unlink()
    assert not run_folder.private.path.exists()
    assert contents(run_folder.path) == before


@pytest.mark.parametrize("end", ["max_steps=2", 'stop_when="step > 0"'])
def test_a_run_is_complete_only_if_a_checkpoint_has_its_last_step(end, tmp_path):
    run_folder = a_run(tmp_path / "whole", end)
    Status(run_folder, "trainer.rank0").set("done")
    for num_saved in (1, 2):
        run_folder.checkpoint(num_saved).mkdir(parents=True)
        assert _is_complete(Run.load(run_folder.config), run_folder) == (num_saved == 2)


@pytest.mark.parametrize(
    ("num_steps", "number", "asked", "is_over", "error", "said"),
    [
        (3, None, True, True, None, ""),  # all steps are done: the end of the time is no matter
        (3, 15, True, False, Stopped, ""),
        (2, None, True, True, OutOfTime, "max_time=1h is over"),
        (2, 15, True, False, Stopped, "stopped, as asked"),
        (2, None, False, False, None, "stop_when is fulfilled"),
    ],
)
def test_the_end_of_a_run_is_said_and_returned(
    num_steps, number, asked, is_over, error, said, tmp_path, capsys
):
    run_folder = a_run(tmp_path / "r")
    rows = ({"step": step, "train/reward": 0.5} for step in range(num_steps))
    run_folder.metrics.write_text("".join(map(json_line, rows)))
    Status(run_folder, "trainer.rank0").set("done: stop_when is fulfilled")
    run, limit = SimpleNamespace(max_steps=3, max_time="1h"), SimpleNamespace(is_over=is_over)
    stop = SimpleNamespace(asked=asked, number=number)
    with pytest.raises(error) if error else nullcontext() as caught:
        assert _end_run(run, run_folder, stop, limit) == 0.5
    assert error is not Stopped or (caught.value.number, caught.value.code) == (15, 0)
    assert error is not OutOfTime or str(caught.value) == said
    shown = capsys.readouterr().out
    assert ("ended before max_steps=3: " + said in shown) == bool(said)
    assert f"r: {num_steps} steps" in shown


def test_a_model_that_cannot_be_fetched_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["run_name=r", "model=hf", "model.path=nobody/nothing"]
    result = train(*arguments, output_dir=tmp_path, program="evaluate.py")
    assert result.stderr.startswith("this run cannot start:\n- cannot get nobody/nothing")
    assert "starting" not in result.stdout
    assert result.returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_wrong_loss_ends_the_engine_that_has_started_and_does_no_step(tmp_path):
    (tmp_path / "wrong.py").write_text("def mine(tokens):\n    return -tokens.logprobs\n")
    given = ["run_name=r", "model.warm_start=null", "sampler=sync", "loss._target_=wrong.mine"]
    given += ["~loss.clip_low", "~loss.clip_high"]
    given += ["inference._target_=scripted_vllm.ScriptedVLLM"]
    paths = {"PYTHONPATH": str(REPO / "tests" / "support"), "OFFBYONE_CACHE": f"{tmp_path}/cache"}
    result = train(*given, output_dir=tmp_path, **paths)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("this run cannot start:\n- loss: wrong.mine, called with eight")
    assert result.stderr.endswith(f"({tmp_path}/wrong.py, line 1)\n")
    assert not (tmp_path / "r").exists()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(tmp_path).encode() in command]


def changed_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


Damage = Callable[[Path], object]
TOKENS = ["client=tokens"]
# What happens to the model, overrides, and the refusal.
DAMAGES: dict[str, tuple[Damage, list[str], str]] = {
    "no config": (
        lambda m: (m / "config.json").unlink(), [], "contains no config.json: save the"),
    "no JSON": (lambda m: cut(m / "config.json"), [], r"model/config.json is not valid JSON \("),
    "another tokenizer": (
        lambda m: changed_json(m / "tokenizer.json", model={"type": "BPE"}), [],
        r"model/tokenizer.json cannot be read \("),
    "half the weights": (
        lambda m: cut(m / "model.safetensors"), [],
        "model/model.safetensors is truncated or not a safetensors file: download it again"),
    "few logits": (
        lambda m: changed_json(m / "config.json", vocab_size=256), [],
        r"has the vocab_size 256, but its tokenizer has tokens with ids from 256 on \('<\|im_sta"),
    "a chat format of its own": (
        lambda m: (m / "chat_template.jinja").write_text("{{ m }} <function=f>"),
        ["model.renderer=auto"], "renderer=auto does not know .* client=tokens, which takes"),
    "a wrong template": (
        lambda m: changed_json(m / "tokenizer_config.json", chat_template="{{ m }"), TOKENS,
        r"has an error \(unexpected '}', line 1\): correct"),
    "no template": (
        lambda m: changed_json(m / "tokenizer_config.json", chat_template=None), TOKENS,
        "has no chat templ"),
    "fewer tokens than vLLM would return": (
        lambda m: few_tokens(m, 64), ["sampler.top_k=40"],
        "vLLM would return 80 tokens at each position, but .* only 64: set sampler.top_k=32 or"),
    "fewer tokens than vLLM returns at least": (
        lambda m: few_tokens(m, 16), ["sampler.top_k=4"],
        "vLLM would return 20 tokens .* only 16: set sampler.allow_biased_ratio=true"),
}  # fmt: skip


def few_tokens(model: Path, size: int) -> None:
    changed_json(model / "config.json", vocab_size=size)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))


def saved_model(folder: Path) -> Path:
    """Return a tiny model with weights."""
    model = model_folder(folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


OWN = ["model=hf", "model.path=model", "model.renderer=qwen3", "adapter=none"]
OWN += ["model.max_seq_len=64", "model.max_tokens=32", "run_name=r"]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Return the only problem of a run that must not start anything nor leave a folder."""
    monkeypatch.chdir(tmp_path)

    def problem_of(*arguments: str) -> str:
        config = composed(*arguments, f"output_dir={tmp_path}")
        primary = lambda name: composed(primary=name)  # noqa: E731
        with pytest.raises(ConfigError) as caught:
            supervise(config, overrides=[*arguments], command=["train.py"], compose=primary)
        assert "starting vLLM" not in capsys.readouterr().out
        assert not (tmp_path / "r").exists()
        (problem,) = caught.value.problems
        return problem

    return problem_of


def test_a_failed_start_says_how_to_start_again_and_is_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saved_model(tmp_path / "model")
    run_folder, signals = RunFolder(tmp_path / "r"), iter([None, 15])

    def execute(launch, *_):
        assert not run_folder.warm_start.exists()
        run_folder.warm_start.mkdir()  # the next start of this run deletes it
        launch.stop.number = next(signals)
        raise RunFailed("vLLM ended")

    monkeypatch.setattr(_Launch, "execute", execute)
    config = composed(*OWN, f"output_dir={tmp_path}")
    given = {"overrides": ["seed=3"], "command": ["python", "t.py"]}
    advice = "vLLM ended\nno step was done: nothing is lost, and run_name can be used again"
    with pytest.raises(RunFailed) as failed:
        supervise(config, **given, compose=composed)
    assert str(failed.value) == advice
    record = yaml.safe_load(run_folder.overrides.read_text())
    start = {"started_in": str(tmp_path), "run_name": "r", "commit": commit_of()}
    assert record == given | start
    with pytest.raises(Stopped) as stopped:  # by a signal, which ends a whole sweep
        supervise(config, **given, compose=composed)
    assert (stopped.value.number, stopped.value.code) == (15, 1)
    assert advice in capsys.readouterr().out


def test_the_files_that_env_and_sampler_read_are_hashed_for_a_resume(tmp_path, monkeypatch):
    prompt, lines = tmp_path / "prompt.txt", tmp_path / "lines.jsonl"
    prompt.write_text("Reverse the word.")
    lines.write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    reads = ["loss=sft", "sampler=transcripts", f"sampler.path={tmp_path}/*.jsonl"]
    monkeypatch.chdir(tmp_path)  # the texts of env contain "*", which names no files
    (tmp_path / "nohup.out").touch()
    run = run_with_facts(composed("env=arithmetic", f"env.system_prompt={prompt}", *reads))
    launch = SimpleNamespace(run_folder=RunFolder(tmp_path / "run"))
    launch.run_folder.path.mkdir()
    launch.dry_call = SimpleNamespace(learned=lambda: Learned.of(run), files=list)
    _Launch._record_dry_call(launch, run)
    assert changed_code(launch.run_folder) == []
    for file in (prompt, lines, tmp_path / "nohup.out"):
        file.write_text("other")
    assert set(changed_code(launch.run_folder)) == {"prompt.txt", "lines.jsonl"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unusable_model_is_refused_before_anything_starts(damage, tmp_path, refused):
    model = saved_model(tmp_path / "model")
    change, overrides, said = DAMAGES[damage]
    change(model)
    assert re.search(said, refused(*OWN, *overrides))


def test_a_teacher_with_fewer_logits_than_the_policy_is_refused(tmp_path, refused):
    saved_model(tmp_path / "model")
    teacher = model_folder(tmp_path / "teacher")
    changed_json(teacher / "config.json", vocab_size=200, pad_token_id=0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(teacher)).save_pretrained(teacher)
    problem = refused(*OWN, "loss=distill", "reference=model", f"reference.path={teacher}")
    assert f"reference.path={teacher} has 200 logits, so it cannot score 64 tokens of" in problem


HOUR = 3600


def test_a_duration_is_read_as_it_is_written():
    durations = {"3h30m": 3.5 * HOUR, "1d 2h": 26 * HOUR, "1.5h": 5400, "1h1m1s": 3661, "600": 600}
    for written, seconds in {**durations, 5400: 5400, 0.5: 0.5}.items():
        assert seconds_of(written) == seconds
    for written in ("", "m", "30m3h", "3 hours", "1:30", "-5m", "0", "nan"):
        with pytest.raises(ValueError, match="is not a duration"):
            seconds_of(written)


def test_the_time_to_save_is_that_of_the_slowest():
    for steps, checkpoints, step, checkpoint in (
        ([90.0, 8.0, *[4.0] * 19], [40.0, *[1e-6] * 20], 8, 40),  # the first of 21 is left out
        ([4.0], [0.02], 4, 0.02),
        ([4.0, 4.0], [1e-6, 1e-6], 4, 30),  # the first checkpoint is assumed to take 30 s
    ):
        pairs = zip(steps, checkpoints, strict=True)
        rows = [{"time/step": each, "time/checkpoint": saving} for each, saving in pairs]
        assert seconds_to_save(rows) == pytest.approx(1.25 * (step + checkpoint) + 5)


@pytest.mark.parametrize(
    ("max_time", "parameters", "latest"),  # the last second at which no end is requested
    [
        ("1h", 4_000_000_000, 4600 - 415),  # 64 GB take 320 s: 1.25 * (8 + 320) + 5 s
        ("10m", 4_000_000_000, 1600 - 202.5),  # at most a quarter of max_time: 150 s
        ("1h", 1_000_000, 4600 - 52.5),  # at least 30 s
    ],
)
def test_a_large_checkpoint_is_assumed_to_take_long(max_time, parameters, latest, tmp_path, clock):
    folder, stop = RunFolder(tmp_path), StopRequest()
    limit = TimeLimit(max_time, folder)
    limit.expect_checkpoint(parameters)
    MetricsFile(folder).append(0, {"time/step": 8.0, "time/checkpoint": 1e-6})
    for now, asked in ((latest - 1, False), (latest + 1, True)):
        clock.now = now
        limit.request_stop_if_due(stop)
        assert stop.asked == asked


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_only_a_run_that_trains_all_weights_expects_a_large_checkpoint(adapter, tmp_path):
    model, expected = model_folder(tmp_path / "model"), []
    run_folder = RunFolder(tmp_path / "model" / "config.json" / "r")
    limit = SimpleNamespace(expect_checkpoint=expected.append)
    resolved = resolve(composed("run_name=r", "model.warm_start=null", f"adapter={adapter}"))
    with pytest.raises(NotADirectoryError):  # so nothing starts
        _Launch(run_folder, None, None, limit, None).execute(resolved, model)
    assert expected == ([read_sizes(model).parameters] if adapter == "none" else [])


@pytest.fixture
def clock(monkeypatch):
    """A time that passes as the test says."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time_limit.time, "time", lambda: clock.now)
    return clock


def test_the_end_is_requested_when_the_remaining_time_is_needed_to_save(tmp_path, clock):
    folder, stop = RunFolder(tmp_path), StopRequest()
    before = MetricsFile(folder)
    clock.now = 500.0
    before.append(0, {"time/step": 1e6})  # by the start before this one
    clock.now = 1000.0
    limit = TimeLimit("10m", folder)
    before.append(1, {"time/step": 8.0, "time/checkpoint": 12.0})  # 30 s with margins
    clock.now = 1569.0
    limit.request_stop_if_due(stop)
    assert (limit.is_over, stop.asked) == (False, False)
    assert limit._rows == [{"time/step": 8.0, "time/checkpoint": 12.0}]  # no other metric is kept
    clock.now = 1571.0
    limit.request_stop_if_due(stop)
    assert (limit.is_over, stop.asked, stop.number) == (True, True, None)


def test_without_a_finished_step_the_run_fails_when_the_time_is_over(tmp_path, clock):
    folder, stop = RunFolder(tmp_path), StopRequest()
    limit = TimeLimit(60, folder)
    clock.now = 1059.0
    limit.request_stop_if_due(stop)
    assert not stop.asked
    clock.now = 1061.0
    with pytest.raises(RunFailed, match="max_time=60 was over before the first step"):
        limit.request_stop_if_due(stop)
