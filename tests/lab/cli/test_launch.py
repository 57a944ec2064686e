"""What a user sees of a command: help, new folders, the few lines of an error, the status."""

import os
import subprocess
import sys

import hydra
import pytest
import yaml
from hydra import initialize_config_dir

from lab.cli import console
from lab.cli.hydra_errors import explain_hydra_error
from lab.cli.launch import (
    _share_code_with_children,
    _start_and_print_errors,
    add_conf_folder,
    command_of,
    launch,
)
from rl.config.schema import ConfigError
from rl.config.shipped import SHIPPED
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.stop_request import Stopped
from rl.runtime.sweep_folder import SweepFolder
from tests.support.composing import CONF, composed
from tests.support.launching import ROOT, train

OWN = ["--config-dir", str(CONF.parent / "examples" / "my-lab" / "conf"), "loss=focal"]
# The launcher is refused after the check of all jobs, so nothing starts without this check.
SWEEP = ["--multirun", "hydra/launcher=submitit_local", "hydra.launcher.cpus_per_task=99999"]


def test_a_name_that_hydra_does_not_know_is_explained():
    for arguments, said in (
        (["loss=cispoo"], "loss=cispoo does not exist: did you mean cispo? (loss has cispo, "),
        (["trainer.max_step=3"], "there is no key trainer.max_step: did you mean max_steps?"),
        (
            ["env=gsm8k", "env.reward_weights={corect: 1}"],
            "did you mean env.reward_weights.correct?",
        ),
        (["los=gspo", "loss=cispoo", "batchsize=3"], "loss=cispoo does not exist: did you mean"),
        (["strategy.branchs=2"], "no key strategy.branchs: the chosen strategy has no options"),
        (["buffer.replay_share=0.5"], "choice of buffer: set buffer=demonstrations|replay"),
        (["inference.args.max_num_batched_tokens=8"], "with +inference.args.max_num_batched_tok"),
        (["gpus=8"], "gpus is not in the configuration yet: add it with +gpus=..."),
    ):
        with pytest.raises(Exception) as caught, initialize_config_dir(str(CONF), "app", None):  # noqa: PT011
            hydra.compose("train", arguments)
        (problem,) = explain_hydra_error(caught.value, arguments, added=["gpus"]).problems
        assert said in problem


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch_size=250"], "use batch_size=240 or 256"),
        (["loss=grpo,cispo"], "To sweep over it, add --multirun"),
        (["--multirun", "loss=grpo,gspoo"], "loss=gspoo does not exist: did you mean gspo?"),
        ([*SWEEP, "seed=-1,0"], "=-1, but it must be >= 0 (1 of 2 runs, first: seed=-1 "),
        ([*SWEEP, "loss=gspo,cispo", "aggregation=token_mean"], "gspo needs equal weights "),
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
    assert "\nloss.gamma=" in shown  # of the user's own choice
    assert "\nmodel.max_tokens=512\n    Maximum number of tokens of a single turn.\n" in shown
    # Of kl=adaptive and not of kl=none
    assert "\nkl.beta=0.05\n    Weight of the divergence at the first step.\n" in shown


def test_a_sweep_whose_arms_play_other_examples_is_told_to_evaluate(tmp_path):
    arms = ["order=difficulty", "optim.learning_rate=1e-4,1e-3", "evaluation=none"]
    result = train(*SWEEP, *arms, output_dir=tmp_path)
    assert "this machine has only" in result.stderr
    assert "training rewards cannot be compared: add evaluation=default" in result.stdout


def test_a_sweep_whose_settings_changed_is_refused(tmp_path):
    sweep = SweepFolder(tmp_path / "x")
    sweep.path.mkdir()
    for seed in (0, 1):
        number, record = sweep.claim(["loss=grpo", f"seed={seed}", f"output_dir={tmp_path}"])
        record.run_name, record.state = f"begun-{seed}", "failed"
        record.folder = str(folder := tmp_path / record.run_name)
        sweep.write(number, record)
        (folder / "checkpoints" / "step_000001").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 0}\n')
        own = ("loss=grpo", f"seed={seed}", f"run_name={record.run_name}")
        config = composed(*own, f"output_dir={tmp_path}")
        config["optim"]["learning_rate"] = 0.5  # the YAML has changed since
        (folder / "config.yaml").write_text(yaml.safe_dump({"format": 2, **config}))
    again = ["--multirun", "loss=grpo,cispo", "seed=0,1,2", f"hydra.sweep.dir={sweep}"]
    result = train(*again, output_dir=tmp_path)
    assert result.returncode == 2
    assert "optim.learning_rate was 0.5 and is 0.0005" in result.stderr
    assert "(3 of 6 runs, first: loss=grpo seed=0" in result.stderr
    assert "the configuration differs from" in result.stderr
    assert not sweep.info.exists()


NAMED = "python train.py --config-name losses --config-dir sweeps hydra.mode=RUN"


def test_the_command_before_the_overrides_is_kept_as_typed():
    sweep = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=x", "hydra.sweeper.max_batch_size=1"]
    sweep += ["hydra/sweeper=optuna", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    kept = ["hydra.job.chdir=true"]
    for typed, command in (
        (".venv/bin/python -u /x/train.py seed=1 -m", ".venv/bin/python -u /x/train.py"),
        ("python train.py --config-dir sweeps --config-name losses seed=1", NAMED),
        ("python train.py -cd mine loss=own", "python train.py --config-dir mine"),
        (
            "python /bin/offbyone train --config-dir mine loss=own",
            "offbyone train --config-dir mine",
        ),
    ):
        parts = typed.split()
        program = next(i for i, part in enumerate(parts) if part.endswith(("train", "train.py")))
        assert command_of(parts, parts[program:], sweep + kept) == command.split() + kept


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError(["one", "two"]), 2, "this run cannot start:\n- one\n- two\n"),
        (RunFailed("\x1b[31mvLLM ended\nits\x07 end"), 1, "the run failed:\nvLLM ended\nits end\n"),
        (OutOfTime("time is over"), 0, ""),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug\n"),  # below the traceback
        (Stopped(15), 0, ""),
        (Stopped(15, 1), 1, ""),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_a_program_says_why_it_ends_and_exits_with_the_status_for_it(
    error, status, said, monkeypatch, capsys
):
    def raise_error():
        raise error

    def main():
        _start_and_print_errors(raise_error, in_sweep=False)

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(SystemExit) as end:
        launch(main)
    assert end.value.code == status
    shown = capsys.readouterr().err
    assert shown.endswith(said) if said else not shown


def call(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/offbyone", *arguments])
    console.main()


def test_all_commands_are_listed_an_unknown_one_is_refused_and_the_exit_status_is_kept(
    monkeypatch, capsys
):
    call(monkeypatch)
    listed = capsys.readouterr().out
    names = (*console.ENTRY_POINTS, *console.FUNCTIONS, "new")
    assert all(f"offbyone {name}" in listed for name in names)
    assert all((SHIPPED / f"{n.replace('-', '_')}.py").exists() for n in console.ENTRY_POINTS)
    with pytest.raises(SystemExit, match="offbyone has no command trian"):
        call(monkeypatch, "trian")
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, "compare-losses", "nowhere")
    assert end.value.code == 2


def test_a_folder_that_hides_one_of_our_packages_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "losses", raising=False)
    (tmp_path / "losses").mkdir()
    (tmp_path / "losses" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match=f"{tmp_path}/losses hides the package losses of offbyone"):
        call(monkeypatch, "train")
    sys.modules.pop("losses", None)


def test_a_new_folder_gives_its_name_to_the_package_its_files_and_text(tmp_path):
    said = console.copy_my_lab([str(tmp_path / "my-idea")])
    assert "offbyone train loss=my_idea" in said
    assert (tmp_path / "my-idea" / "my_idea" / "focal.py").is_file()
    assert (tmp_path / "my-idea" / "conf" / "loss" / "my_idea.yaml").is_file()
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 20
    assert not any("my_lab" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("losses", "losses is already a loss, a module or a folder of a lab: choose another"),
        ("json", "json is already a loss, a module"),
        ("grpo", "grpo is already a loss"),
        ("class", "class cannot be the name of a Python package"),
        ("full", "full is a file or is not empty: choose another folder"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, name, why):
    (tmp_path / "full").touch()
    with pytest.raises(SystemExit, match=why):
        console.copy_my_lab([str(tmp_path / name)])
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_folder_conf_of_the_current_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert add_conf_folder(["loss=mine"]) == ["loss=mine"]
    (tmp_path / "conf").mkdir()
    assert add_conf_folder(["loss=mine"]) == ["--config-dir", "conf", "loss=mine"]
    assert add_conf_folder(["--config-dir", "conf", "a=1"]) == ["--config-dir", "conf", "a=1"]
    sweeps = str(SHIPPED / "sweeps")
    searched = f"hydra.searchpath=[file://{tmp_path.resolve()}/conf]"
    assert add_conf_folder(["--config-dir", "sweeps"]) == ["--config-dir", sweeps, searched]
    assert add_conf_folder(["-cd=sweeps"]) == [f"-cd={sweeps}", searched]
    own = ["--config-dir", "mine", "hydra.searchpath=[file:///x]"]
    assert add_conf_folder(own) == own
    monkeypatch.chdir(SHIPPED)
    assert add_conf_folder(["loss=mine"]) == ["loss=mine"]


@pytest.mark.parametrize("has_other", [True, False])
def test_child_processes_import_the_code_of_the_started_script(has_other, tmp_path, monkeypatch):
    if has_other:  # another copy of this project, which the Python environment installs
        (tmp_path / "rl").mkdir()
        (tmp_path / "rl" / "__init__.py").touch()
        monkeypatch.setattr(sys, "path", [str(ROOT), str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _share_code_with_children()
    command = [sys.executable, "-P", "-c", "import rl; print(rl.__file__)"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(ROOT / "rl" / "__init__.py")
    assert os.environ["PYTHONPATH"].split(os.pathsep)[-1] == str(tmp_path)
    assert (os.environ["PYTHONPATH"] == str(tmp_path)) != has_other
