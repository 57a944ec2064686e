"""Copy the files and commands of docs/everyday.md and run them, with a scripted server for vLLM."""

import gzip
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rl.learner.optim import AdamW
from tests.support import printed
from tests.support.composing import composed
from tests.support.launching import ROOT, SCRIPTED, Result, begin, ended, nightly

PAGE = ROOT / "docs" / "everyday.md"
FILES, COMMANDS = printed.files(PAGE), printed.commands(PAGE)
_, SCHEDULED, FIRST, SECOND, _, EVALUATE, SHOWN, PLAN, REPORT = COMMANDS
SHORT = f"{' '.join(SCRIPTED)} sampler=sync batch_size=16 group_size=8"
SECONDS = 300


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    printed.write(PAGE, folder)
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


def test_the_scheduled_command_is_accepted_but_for_a_mistake_that_is_added(mine):
    done = do(f"{SCHEDULED} batch_size=17", mine)
    assert done.status == 2, done.screen
    title, *problems = done.screen.strip().splitlines()
    assert title == "this run cannot start:"
    assert problems
    assert all("batch_size=17 is " in problem for problem in problems)


def test_the_configuration_is_shown_whole_and_by_group_and_planned(mine):
    group_shown = SHOWN.replace("--resolve", "--package loss")
    whole, group, plan = (do(command, mine) for command in (SHOWN, group_shown, PLAN))
    assert (whole.status, group.status, plan.status) == (0, 0, 0), whole.screen + plan.screen
    assert "_target_: losses.ppo_clip.ppo_clip" in whole.screen
    assert group.screen.startswith("# @package loss\n_target_: losses.ppo_clip.ppo_clip\n")
    assert plan.screen.splitlines()[2].startswith("trainer ")


def test_the_schedule_of_the_page_halves_the_rate(mine, monkeypatch):
    monkeypatch.syspath_prepend(str(mine))
    from halving import Halving  # pyright: ignore[reportMissingImports]

    node = composed("optim=halving", config_dir=mine / "conf")["optim"]
    assert node.pop("_target_") == "halving.Halving"
    optim = Halving(**node)
    assert isinstance(optim, AdamW)
    assert optim.rate(60, 150) == pytest.approx(optim.rate(10, 150) / 2)


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


class Pdb:
    """A user who answers each prompt of the debugger on a terminal."""

    def __init__(self, command: str, folder: Path) -> None:
        self.screen, ours = "", pty.openpty()
        self._terminal, theirs = ours
        self._process = subprocess.Popen(
            typed(command), shell=True, cwd=folder,
            # An empty value is Python's default, whatever this session's environment says.
            env={**os.environ, **environment(folder), "PYTHONBREAKPOINT": ""},
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def answer(self, *lines: str) -> int:
        """Type each line at a prompt, and `c` at all later ones; return the exit status."""
        to_type, num_typed = iter(lines), 0
        try:
            while True:
                self.screen += os.read(self._terminal, 4096).decode(errors="replace")
                # The supervisor may have written behind a prompt, so count the prompts.
                if self.screen.count("(Pdb) ") > num_typed:
                    num_typed += 1
                    os.write(self._terminal, f"{next(to_type, 'c')}\n".encode())
        except OSError:  # all processes have closed the terminal
            return self._process.wait(SECONDS)
        finally:
            self._process.kill()
            os.close(self._terminal)


@nightly
def test_breakpoint_opens_pdb_in_the_terminal_in_a_run_from_the_weights_of_another(first, mine):
    text = FILES["watched.py"]
    stops = text.replace("    ratio =", "    breakpoint()\n    ratio =", 1)
    (mine / "watched.py").write_text(stops)
    user = Pdb(f"{SECOND} max_steps=1 model.max_tokens=32 {SHORT}", mine)
    status = user.answer("p tokens.logprobs.requires_grad, most + 37", "p most * 1000")
    (mine / "watched.py").write_text(text)
    assert status == 0, user.screen
    assert "-> ratio = ratio_to(tokens.anchor" in user.screen, user.screen
    assert "(True, 42.0)" in user.screen
    assert "5000.0" in user.screen
    assert "1/1 steps" in user.screen
    assert not (mine / "outputs" / "second" / "profile").exists()
    model = (mine / "outputs" / "second" / "model.txt").read_text().splitlines()[0]
    assert model == str(first.folder / "checkpoints" / "step_000003" / "hf")
    config = (mine / "outputs" / "second" / "config.yaml").read_text()
    assert "init_from: first:3\n" in config
    diff = do("diff outputs/first/config.yaml outputs/second/config.yaml", mine)
    assert diff.status == 1
    assert "< max_steps: 50\n" in diff.screen
    assert "> init_from: first:3\n" in diff.screen
    report = do(REPORT, mine)
    assert report.status == 0, report.screen
    assert "Initial weights from other runs: first, step 3." in report.screen


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
