"""The files and commands of docs/a-new-idea.md and docs/everyday.md, and the examples.

A script answers in place of vLLM. The notebook runs in an event loop, as in Jupyter. The files of
examples/cluster are not run: composition, shell syntax, versions.
"""

import gzip
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from losses.groups import ScoredGroup
from rl.config.build import build
from rl.config.check import check
from rl.config.rules import RULES
from rl.runtime.folder import RunFolder
from tests.support import printed
from tests.support.composing import composed
from tests.support.launching import ROOT, SCRIPTED, Process, Result, begin, ended, nightly

IDEA, EVERYDAY = (ROOT / "docs" / f"{name}.md" for name in ("a-new-idea", "everyday"))
_, TABLE, FIRST_LOOK, SWEEP = printed.commands(IDEA)
_, SCHEDULED, FIRST, SECOND, _, EVALUATE, SHOWN, PLAN, _ = printed.commands(EVERYDAY)
SHORT = f"{' '.join(SCRIPTED)} sampler=sync batch_size=16 group_size=8"
SECONDS = 300


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    for page in (IDEA, EVERYDAY):
        printed.write(page, folder)
    rows = [{"question": f"reverse {word}", "answer": word[::-1]} for word in ("abc", "tree")]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def typed(command: str) -> str:
    """Return a command as printed, with this interpreter and checkout, and a short run's step."""
    line = command.replace("/path/to/offbyone", str(ROOT)).replace("step_000150", "step_000003")
    line = line.replace("init_from=first:150", "init_from=first:3")
    return line.replace("python", sys.executable, 1)


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{folder}", "OFFBYONE_CACHE": str(folder / "cache")}


def do(command: str, folder: Path, name: str = "") -> Result:
    process = begin(typed(command), folder, environment(folder))
    return ended(process, folder / "outputs" / name, SECONDS)


def test_each_idea_is_one_file_and_one_yaml_and_the_table_of_the_loss_holds(mine):
    parts = {"env": "relay", "loss": "patient", "advantage": "turn_median"}
    code = {f"{name}.py" for name in parts.values()}
    settings = {f"conf/{group}/{name}.yaml" for group, name in parts.items()}
    sweep, files = "conf/does_patience_help.yaml", printed.files(IDEA)
    assert set(files) == {*code, *settings, "test_patient.py", sweep}
    assert "override evaluation: default" in files[sweep]  # arms are judged on the same examples
    done = do(TABLE, mine)
    assert done.status == 0, done.screen
    assert "1 passed" in done.screen


def test_the_advantage_subtracts_the_median_of_each_turn(mine, monkeypatch):
    monkeypatch.syspath_prepend(str(mine))
    from turn_median import turn_median  # pyright: ignore[reportMissingImports]

    rewards = [[1, 1], [1], [0, 0], None]  # medians 1 and, of two, 1/2
    group = ScoredGroup.by_hand([None] * len(rewards), turn_rewards=rewards)
    assert turn_median(group) == [[0, 0.5], [0], [-1, -0.5], []]


@pytest.mark.parametrize(
    ("command", "wrong", "said"),
    [
        (FIRST_LOOK, "loss.patience=0", "loss.patience=0, but it must be > 0"),
        (SWEEP, "batch_size=17", "batch_size=17 is not a multiple"),
        (SCHEDULED, "batch_size=17", "batch_size=17 is not a multiple"),
    ],
    ids=["run", "sweep", "scheduled"],
)
def test_a_printed_command_is_accepted_but_for_a_mistake_that_is_added(command, wrong, said, mine):
    done = do(f"{command} {wrong}", mine)
    assert done.status == 2, done.screen
    title, *problems = done.screen.strip().splitlines()
    assert title.endswith(" cannot start:")
    assert said in problems[0]
    assert all(wrong in problem for problem in problems)


@pytest.fixture(scope="module")
def first(mine) -> Result:
    early = "'stop_when=\"step >= 2\"' max_steps=50 trainer.profile=1 model.warm_start=null"
    return do(f"{FIRST.replace('trainer.profile=2 ', '')} {early} {SHORT}", mine, "first")


@nightly
def test_a_run_logs_the_metric_follows_the_schedule_is_profiled_and_stops_early(first):
    assert first.status == 0, first.screen
    assert "ended before max_steps=50: stop_when=step >= 2 is fulfilled" in first.screen
    assert "resume=true" not in first.screen
    assert [line["step"] for line in first.metrics] == [0, 1, 2]
    assert all(0 <= line["train/bounded"] <= 1 for line in first.metrics)
    rates = [line["train/learning_rate"] for line in first.metrics]
    assert rates == pytest.approx([1e-4 * (n + 1) * 0.5 ** (n / 50) for n in range(3)])
    trace = json.loads(gzip.decompress((first.folder / "profile/rank0.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "ProfilerStep#1"} <= names
    assert "ProfilerStep#2" not in names
    assert "aten::mm" in (first.folder / "profile" / "rank0.txt").read_text()


@nightly
def test_breakpoint_opens_pdb_in_the_terminal_in_a_run_from_the_weights_of_another(first, mine):
    text = (mine / "watched.py").read_text()
    stops = text.replace("    ratio =", "    breakpoint()\n    ratio =", 1)
    (mine / "watched.py").write_text(stops)
    command = f"{SECOND} max_steps=1 model.max_tokens=32 {SHORT}"
    # An empty value is Python's default, whatever this session's environment says.
    own = {**os.environ, **environment(mine), "PYTHONBREAKPOINT": ""}
    terminal, theirs = pty.openpty()
    os.write(terminal, b"p tokens.logprobs.requires_grad, most + 37\np most * 1000\n" + b"c\n" * 99)
    pipes, screen = dict.fromkeys(("stdin", "stdout", "stderr"), theirs), ""
    with Process(typed(command), shell=True, cwd=mine, env=own, **pipes) as process:
        os.close(theirs)
        with suppress(OSError):  # when all processes have closed the terminal
            while part := os.read(terminal, 4096):
                screen += part.decode(errors="replace")
        os.close(terminal)
        assert process.wait(SECONDS) == 0, screen
    (mine / "watched.py").write_text(text)
    said = ("-> ratio = ratio_to(tokens.anchor", "(True, 42.0)", "5000.0", "1/1 steps")
    assert [part for part in said if part not in screen] == [], screen
    assert not (mine / "outputs" / "second" / "profile").exists()
    model = (mine / "outputs" / "second" / "model.txt").read_text().splitlines()[0]
    assert model == str(first.folder / "checkpoints" / "step_000003" / "hf")


@nightly
def test_a_file_is_evaluated_and_python_reads_the_run(first, mine):
    few = f"{SCRIPTED[0]} num_examples=2 rollouts_per_example=2 model.max_tokens=32"
    done = do(f"{EVALUATE} {few}", mine, "on-my-file")
    assert done.status == 0, done.screen
    lines = map(json.loads, (done.folder / "rollouts.jsonl").read_text().splitlines())
    questions = {line["messages"][0]["content"] for line in lines}
    assert questions == {"reverse abc", "reverse tree"}
    looked = do("python look.py", mine)
    assert looked.status == 0, looked.screen
    assert "columns of tokens id row update" in looked.screen
    assert "gradient tensor([-1.0000, -0.3679])" in looked.screen


CLUSTER = sorted((ROOT / "examples" / "cluster").iterdir())
NOTEBOOK = '"max_steps=3", "batch_size=16", "group_size=8", "sampler=sync", "model.warm_start=null"'
ENGINE, MISMATCH = (f'"{override}"' for override in SCRIPTED)


@nightly
def test_the_notebook_trains_draws_and_samples(tmp_path):
    changes = [
        f'"max_steps=60"=>{NOTEBOOK}, {ENGINE}, {MISMATCH}',
        f'"num_examples=20"=>"num_examples=2", "model.max_tokens=32", {ENGINE}',
    ]
    notebook = str(ROOT / "examples" / "a-run-from-python.ipynb")
    command = [sys.executable, "-m", "tests.support.notebooks", notebook, *changes]
    result = ended(begin(command, tmp_path, {"PYTHONPATH": str(ROOT)}), tmp_path, 500)
    assert result.status == 0, result.screen
    assert result.screen.count("displayed image/png") == 3
    assert "displayed text/plain text/html <Run " in result.screen
    evaluation, run = sorted((tmp_path / "outputs").iterdir())
    assert len(RunFolder(evaluation).evaluated.read_text().splitlines()) == 4
    assert os.listdir(RunFolder(run).checkpoints) == ["step_000003"]
    # The command that resumes the run is that of a terminal.
    assert "offbyone\n- train" in RunFolder(run).overrides.read_text()


async def test_own_harness_passes_the_check_and_searches_its_index(monkeypatch, tmp_path):
    home = ROOT / "examples" / "own-harness"
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.chdir(home)
    config = composed("experiment=own-harness", config_dir=home / "conf")
    check({**config, "output_dir": str(tmp_path)})
    env = build(config["env"])()
    (example, *_) = env.examples("train")
    assert "Lake" in example.messages[-1]["content"]
    (search,) = env.tool_specs
    assert list(search["parameters"]["properties"]) == ["query"]  # the index is not the policy's


@pytest.mark.parametrize("path", CLUSTER, ids=lambda path: path.name)
def test_a_file_of_a_cluster_has_no_error_of_syntax_and_its_run_composes(path, tmp_path):
    text = path.read_text()
    content = yaml.safe_load(text) if path.suffix == ".yaml" else {"run": text}
    shell = content.get("run") or content["spec"]["entrypoint"]
    if path.name == "kuberay.yaml":
        (pinned,) = re.findall(r'"ray==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
        assert content["spec"]["rayClusterSpec"]["rayVersion"] == pinned
    subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
    (command,) = re.findall(r"train\.py (cluster=[^&\n]*)", shell.replace("\\\n", " "))
    overrides = shlex.split(re.sub(r"\$\w+", "some", command))  # variables get some value
    config = composed(*overrides, f"output_dir={tmp_path}")
    assert [problem for rule in RULES for problem in rule(config)] == []
    assert config["cluster"]["gpus"]
