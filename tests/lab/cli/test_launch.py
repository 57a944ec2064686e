"""What a user sees: a few lines, no traceback, an exit status. Each test starts real processes."""

import os
import signal
import subprocess
import sys
import time

import hydra
import pytest
import yaml
from hydra import initialize_config_dir

from lab.cli.hydra_errors import explain_hydra_error
from lab.cli.launch import command_of, launch, put_options_first
from rl.runtime.failure import RunFailed
from rl.runtime.stop_request import Stopped
from rl.runtime.sweep_folder import SweepFolder
from tests.support.composing import CONF, REPO, composed
from tests.support.launching import train

OWN = ["--config-dir", str(CONF.parent / "examples" / "my-lab" / "conf"), "loss=focal"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loss=cispoo"], "loss=cispoo does not exist: did you mean cispo? (loss has cispo, "),
        (["batchsize=3"], "there is no key batchsize: did you mean batch_size?"),
        (["loss=gprg"], "loss=gprg does not exist: did you mean grpo? (loss has cispo, "),
        (["trainer.max_step=3"], "there is no key trainer.max_step: did you mean max_steps?"),
        (["loss=grpo", "loss.clip_hihg=3"], "no key loss.clip_hihg: did you mean loss.clip_high?"),
        (["model.xyz=x"], "there is no key model.xyz: model has hidden_size, "),
        (
            ["env=gsm8k", "env.reward_weights={corect: 1}"],
            "did you mean env.reward_weights.correct?",
        ),
        (["xyz=3"], "there is no key xyz (python train.py --help lists all keys)"),
        (["los=gspo", "loss=cispoo", "batchsize=3"], "loss=cispoo does not exist: did you mean"),
        (["strategy.branchs=2"], "no key strategy.branchs: the chosen strategy has no options"),
        (["buffer.replay_share=0.5"], "choice of buffer: set buffer=demonstrations|replay"),
        (["loss", "grpo"], "loss cannot be read: write key=value"),
        (["inference.args.max_num_batched_tokens=8"], "with +inference.args.max_num_batched_tok"),
        (["deepspeed.dump_state=true"], "in the configuration yet: add it with +deepspeed.dump_st"),
        (["gpus=8"], "gpus is not in the configuration yet: add it with +gpus=..."),
    ],
)
def test_a_name_that_hydra_does_not_know_is_explained(arguments, said):
    with pytest.raises(Exception) as caught, initialize_config_dir(str(CONF), version_base=None):  # noqa: PT011
        hydra.compose("train", arguments)
    (problem,) = explain_hydra_error(caught.value, arguments, added=["gpus"]).problems
    assert said in problem


def test_a_group_that_a_yaml_overrides_without_a_package_is_named(tmp_path):
    (tmp_path / "loss").mkdir()
    own = "defaults: [grpo, {override /advantage: rloo}, _self_]"
    (tmp_path / "loss" / "own.yaml").write_text(own)
    result = train("--config-dir", str(tmp_path), "loss=own", output_dir=tmp_path)
    assert result.stderr.endswith(
        "- loss/own.yaml must give advantage a Hydra package: write override "
        "/advantage@_global_.advantage: <choice>\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_size=250"], "use batch_size=240 or 256"),
        (["resume=true"], "resume=true needs the name of the run: add run_name=<a folder in "),
        (["loss=grpo,cispo"], "To sweep over it, add --multirun"),
        (["--multirun", "loss=grpo,gspoo"], "loss=gspoo does not exist: did you mean gspo?"),
        ([*OWN, "loss.gama=3"], "there is no key loss.gama: did you mean loss.gamma?\n"),
    ],
)
def test_a_mistake_is_reported_in_a_few_lines(arguments, said, tmp_path):
    result = train(*arguments, output_dir=tmp_path / "outputs", started_in=tmp_path)
    assert said in result.stderr
    what = "sweep" if "--multirun" in arguments else "run"
    assert result.stderr.startswith(f"this {what} cannot start:\n- ")
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) <= 5
    assert (result.returncode, result.stdout) == (2, "")
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_the_help_explains_each_key_of_the_chosen_groups(tmp_path):
    result = train(*OWN, "model=qwen3-0.6b", "kl=adaptive", "--help", output_dir=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    shown = result.stdout
    assert "\nmax_steps=150\n    Number of steps of the run, including those" in shown
    assert "\nresume=false\n    true: resume run_name from its last complete checkpoint.\n" in shown
    assert "\nloss.gamma=" in shown  # of the user's own choice
    assert "\nmodel.max_tokens=512\n    Maximum number of tokens of a single turn.\n" in shown
    # Of kl=adaptive and not of kl=none
    assert "\nkl.beta=0.05\n    Weight of the divergence at the first step.\n" in shown
    maximum = "Maximum number of tokens of a single turn."
    assert f"\nsampler.max_tokens=${{model.max_tokens}}\n    {maximum}\n" in shown
    assert shown.count("\n    ") > 100


PROGRAM = """
import sys
import time

import hydra

from rl.config.schema import ConfigError
from rl.runtime.failure import OutOfTime, RunFailed
from lab.cli.launch import Job, compose, launch, as_hydra_task


@hydra.main(version_base=None, config_path="conf", config_name="train")
@as_hydra_task
def main(job: Job):
    print(job.config["run_name"], job.overrides, job.choices, flush=True)
    match job.config["do"]:
        case "refuse":
            raise ConfigError(["one", "two"])
        case "fail":
            raise RunFailed("vLLM \x1b[31mended\\nits\x07 last line")
        case "stop":
            raise OutOfTime("time is over")
        case "crash":
            raise ZeroDivisionError("a bug")
        case "sleep":
            time.sleep(60)
        case "compose":
            print(compose("imitation"), flush=True)
    return 1.0


launch(main)
"""

PRIMARY = """
defaults: [{loss: a}, _self_]
do: nothing
run_name: ${hydra:runtime.choices.loss}-s${seed}
seed: 0
hydra:
  output_subdir: null
  run: {dir: out}
  sweep: {dir: out, subdir: .}
  job_logging: {root: null}
  hydra_logging: {root: null}
"""


@pytest.fixture
def program(tmp_path):
    """A little program with a configuration of its own."""
    (tmp_path / "conf" / "loss").mkdir(parents=True)
    (tmp_path / "conf" / "train.yaml").write_text(PRIMARY)
    for choice in "ab":
        (tmp_path / "conf" / "loss" / f"{choice}.yaml").write_text(f"name: {choice}")
    imitation = "defaults: [train, {override loss: b}, _self_]\ndo: nothing"
    (tmp_path / "conf" / "imitation.yaml").write_text(imitation)
    (tmp_path / "sweeps").mkdir()
    sweep = "{mode: MULTIRUN, sweeper: {params: {loss: 'a,b', seed: range(2)}}}"
    text = f"defaults: [train, _self_]\nhydra: {sweep}\n"
    (tmp_path / "sweeps" / "seeds.yaml").write_text(text)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def start(program, *arguments):
    command, pipe = [sys.executable, "program.py", *arguments], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        command, cwd=program, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def run(program, *arguments):
    """Exit status, standard output and standard error."""
    process = start(program, *arguments)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("what", "status", "errors"),
    [
        ("refuse", 2, "this run cannot start:\n- one\n- two\n"),
        ("fail", 1, "the run failed:\nvLLM ended\nits last line\n"),
        ("stop", 0, ""),
    ],
)
def test_the_task_says_why_it_stops(what, status, errors, program):
    assert run(program, f"do={what}") == (status, f"a-s0 ['do={what}'] {{'loss': 'a'}}\n", errors)


def test_a_bug_keeps_its_whole_traceback(program):
    status, _, errors = run(program, "do=crash")
    assert status == 1
    assert "program.py" in errors
    assert errors.endswith("ZeroDivisionError: a bug\n")


def test_ctrl_c_takes_one_line(program):
    process = start(program, "do=sleep")
    process.stdout.readline()  # it has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "\ninterrupted\n")


def test_a_sweep_goes_on_when_a_run_fails_and_says_so_at_the_end(program):
    status, output, errors = run(program, "--multirun", "do=fail,stop,nothing", "seed=0,1")
    assert status == 1
    names = [line.split()[0] for line in output.splitlines()]
    assert names == ["a-s0-0", "a-s1-1", "a-s0-2", "a-s1-3", "a-s0-4", "a-s1-5"]
    assert errors.count("the run failed:\nvLLM ended\nits last line\n") == 2
    assert "Traceback" not in errors


def test_a_sweep_stops_at_a_run_that_cannot_start(program):
    status, output, errors = run(program, "--multirun", "do=refuse,nothing")
    assert (status, len(output.splitlines())) == (2, 1)
    assert errors == "this run cannot start:\n- one\n- two\n"


@pytest.mark.parametrize("sweep", [[], ["--config-dir=sweeps", "--config-name=seeds"]])
def test_another_configuration_can_be_composed_inside_a_task(sweep, program):
    status, output, errors = run(program, *sweep, "do=compose")
    assert (status, errors) == (0, "")
    runs = 4 if len(sweep) == 2 else 1
    composed = "{'loss': {'name': 'b'}, 'do': 'nothing', 'run_name': 'b-s0', 'seed': 0}"
    assert output.splitlines().count(composed) == runs


def test_all_runs_of_a_sweep_are_checked_before_the_first_starts(tmp_path):
    overrides = ["loss=gspo,cispo", "aggregation=token_mean", "seed=0,1,-1"]
    result = train("--multirun", *overrides, output_dir=tmp_path)
    assert result.returncode == 2
    # In this order nothing is trained should the check be missing.
    first = "seed=-1, but it must be >= 0 (2 of 6 runs, first: loss=gspo agg"
    assert result.stderr.startswith(f"this sweep cannot start:\n- {first}")
    assert "\n- losses.gspo.gspo needs equal weights of all sequences" in result.stderr
    assert "(2 of 6 runs, first: loss=gspo aggregation=token_mean seed=0 " in result.stderr


def test_a_sweep_whose_arms_play_other_examples_is_told_to_evaluate(tmp_path):
    # The launcher is refused after the check, so nothing starts.
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.cpus_per_task=99999"]
    rates, seeds = "optim.learning_rate=1e-4,1e-3", "seed=0,1"
    for more, number in (
        (["order=difficulty", rates], 1), (["order=shuffled", rates], 0),
        (["order=difficulty", seeds], 0),  # seeds of one arm
    ):  # fmt: skip
        overrides = ["evaluation=none", *more, *launcher]
        result = train("--multirun", *overrides, output_dir=tmp_path)
        assert "this machine has only" in result.stderr
        assert result.stdout.count("warning: an order, a buffer or a strategy chooses") == number


def test_a_sweep_whose_settings_changed_is_refused(tmp_path):
    sweep = SweepFolder(tmp_path / "x")
    sweep.path.mkdir()
    for loss, seed in (("grpo", 0), ("grpo", 1), ("cispo", 0)):
        number, record = sweep.claim([f"loss={loss}", f"seed={seed}", f"output_dir={tmp_path}"])
        record.run_name = name = f"begun-{seed}" if loss == "grpo" else "without-a-step"
        record.folder, record.state = str(tmp_path / name), "failed"
        sweep.write(number, record)
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0}\n' if loss == "grpo" else "")
        own = (f"loss={loss}", f"seed={seed}", f"run_name={name}")
        config = composed(*own, f"output_dir={tmp_path}")
        config["optim"]["learning_rate"] = 0.5  # the YAML has changed since
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump({"format": 2, **config}))
        copy = tmp_path / name / "code" / "step_000000" / "losses" / "ppo_clip.py"
        copy.parent.mkdir(parents=True)
        copy.write_text("the loss as it was\n")
        if loss == "grpo":
            (tmp_path / name / "checkpoints" / "step_000001").mkdir(parents=True)
    again = ["--multirun", "loss=grpo,cispo", "seed=0,1,2", f"hydra.sweep.dir={sweep}"]
    result = train(*again, output_dir=tmp_path)
    assert result.returncode == 2
    assert "optim.learning_rate was 0.5 and is 0.0005" in result.stderr
    assert "(3 of 6 runs, first: loss=grpo seed=0" in result.stderr
    assert "the configuration differs from" in result.stderr
    assert f"losses/ppo_clip.py changed since {tmp_path}/begun-0 was trained" in result.stderr
    assert "without-a-step" not in result.stderr
    assert not sweep.info.exists()


NAMED = "python train.py --config-name losses --config-dir sweeps hydra.mode=RUN"


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("python train.py loss=grpo", "python train.py"),
        (".venv/bin/python -u /x/train.py seed=1 -m", ".venv/bin/python -u /x/train.py"),
        ("python train.py --config-dir sweeps --config-name losses seed=1", NAMED),
        ("python train.py -cd mine loss=own", "python train.py --config-dir mine"),
        ("python train.py -cp there loss=own", "python train.py --config-path there"),
    ],
)
def test_the_command_before_the_overrides_is_kept_as_typed(typed, command):
    parts = typed.split()
    program = next(index for index, part in enumerate(parts) if part.endswith(".py"))
    sweep = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=x", "hydra.sweeper.max_batch_size=1"]
    sweep += ["hydra/sweeper=optuna", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    kept = ["hydra.job.chdir=true"]
    assert command_of(parts, parts[program:], sweep + kept) == command.split() + kept


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (Stopped(15), 0, ""),
        (Stopped(15, 1), 1, ""),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (RunFailed("printed before"), 1, ""),
        (ValueError("no"), 2, "this run cannot start:\n- no\n"),
    ],
)
def test_the_exit_status_says_how_a_program_ended(error, status, said, monkeypatch, capsys):
    def main():
        raise error

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as end:
        launch(main)
    assert (end.value.code, capsys.readouterr().err) == (status, said)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the user wants tracebacks of Hydra's errors
    with pytest.raises(ValueError if isinstance(error, ValueError) else SystemExit):
        launch(main)


def test_overrides_may_stand_on_both_sides_of_options():
    overrides, options = ["seed=1", "~logger", "seed=1"], ["-m", "--config-name=losses"]
    typed = ["output_dir=x", "--config-dir", "sweeps", *options, *overrides]
    assert put_options_first(typed) == [
        *("--config-dir", "sweeps", "-m", "--config-name=losses"),
        *("output_dir=x", "seed=1", "~logger", "seed=1"),
    ]
    assert put_options_first(["--help"]) == ["--help"]
