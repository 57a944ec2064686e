"""What a run writes, logs and shows, its defaults, and warnings about well-known problems.

docs/troubleshooting.md has the name of each warning. TensorBoard's files are read back by its own
reader. An error of a service is one warning and does not end the run.
"""

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from envs.messages import tool_call
from rl.config.learned import Learned
from rl.dry_call.learn import run_with_facts
from rl.evaluation.summary import PlayedExample, summarise
from rl.placement.placement import Place
from rl.runtime.failure import message_of
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile, read_metrics
from rl.runtime.status import ProcessStatus
from rl.supervisor.children import _device_environment
from rl.terminal.panel import RunView, live_panel
from rl.terminal.screen import final_summary, step_line
from rl.trainer.alarms import WINDOW, Alarms, peak_memory_gib
from rl.trainer.loggers import WandbLogger, rollout_rows, wandb_id
from rl.trainer.tensorboard_logger import TensorBoardLogger
from tests.rl.rollouts.test_golden_batch import MASKED
from tests.rl.terminal.test_screen import STEP
from tests.support.composing import composed, learned
from tests.support.golden import golden

FINE = {"train/reward": 0.5, "train/entropy": 0.4}
FINE |= {"rollout/zero_spread": 0.3, "rollout/truncated": 0.0}


def warnings(caplog, *rows: dict, loss_reads: tuple[str, ...] = ("advantages",)) -> list[str]:
    facts = learned(advantage_compares=True, loss_reads=loss_reads)
    alarms = Alarms(Learned(**facts))
    for row in (row for row in rows for _ in range(WINDOW)):
        alarms.add(FINE | row)
    return caplog.messages


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"train/entropy": 0.001, "train/reward": 0.9},  # the policy has learned the task
        {"train/reward": None, "train/entropy": float("nan")},
        {"train/reward": 0.3, "train/entropy": None},  # nothing was trained
        # Each is just within its limit, or equal to it.
        {"rollout/zero_spread": 0.89, "rollout/truncated": 0.49, "rollout/untrained": 0.49},
        {"train/reward": 0.25},  # half of the best
        {"train/reward": 0.3, "train/entropy": 0.021},  # a twentieth of the first would be 0.02
        {"train/reward": 0.41, "train/entropy": 0.01},  # 0.8 times the best would be 0.4
    ],
)
def test_no_alarm_without_a_problem(row, caplog):
    assert warnings(caplog, {}, row) == []
    # Rewards that were never above a twentieth do not fall.
    assert warnings(caplog, {"train/reward": 0.046875}, {"train/reward": 0.0}) == []
    # A loss that reads no advantages needs no spread.
    assert warnings(caplog, {"rollout/zero_spread": 1.0}, loss_reads=("ref_logprobs",)) == []


def test_each_problem_beyond_its_limit_is_named_once(caplog):
    row = {"rollout/truncated": 0.5, "rollout/untrained": 0.5, "rollout/zero_spread": 0.91}
    row |= {"train/reward": 0.24, "train/entropy": 0.01}
    said = warnings(caplog, {}, row, row)
    pages = [message.partition("docs/troubleshooting.md, ")[2] for message in said]
    # The first rows have no untrained rollouts, and their steps are not averaged.
    assert pages == ["masked)", "no spread)", "instability)", "entropy)", "length)"]
    assert "the mean reward fell from 0.50 to 0.24" in said[2]


@pytest.mark.parametrize(
    ("early", "last", "warns"),
    [(2.0, 3.0, False), (2.0, 3.1, True), (1.0, 1.9, False), (4.0, 5.9, False)],
)
def test_memory_that_grows_by_half_and_a_gib_is_named(early, last, warns, caplog):
    left = [early, *[last] * WINDOW]
    alarms = Alarms(Learned(**learned()), memory=lambda: left.pop(0))
    reward = None if last > 3 else 0.5  # None: the run trains on demonstrations
    for _ in range(2 * WINDOW - 1):
        alarms.add(FINE | {"train/reward": reward})
    said = "the memory of rank 0 grew from 2.0 to 3.1 GiB"
    assert [said in message for message in caplog.messages] == [True] * warns
    assert 0.01 < peak_memory_gib() < 100


def test_errors_of_a_process_without_memory_or_files_name_the_remedy():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert "lower trainer.tokens_per_micro_batch" in message_of(caught.value)
    page = "(docs/troubleshooting.md, memory)"
    assert page in message_of(OSError(12, "Cannot allocate memory"))
    assert page in message_of(MemoryError())
    assert page in message_of(RuntimeError("std::bad_alloc"))
    assert "ulimit -Hn" in message_of(OSError(24, "Too many open files"))


def test_a_resumed_run_remembers_best_reward_first_entropy_and_the_warnings_given(tmp_path, caplog):
    folder, run = RunFolder(tmp_path), run_with_facts(composed())
    metrics, bad = MetricsFile(folder), {"rollout/truncated": 0.6}
    for step in range(2 * WINDOW):
        metrics.append(step, FINE | (bad if step >= WINDOW else {}))
    alarms = Alarms.of(run, folder, 2 * WINDOW)
    assert caplog.messages == []
    for _ in range(WINDOW):
        alarms.add(FINE | bad | {"train/reward": 0.2})
    (message,) = caplog.messages
    assert "the mean reward fell from 0.50 to 0.2" in message
    caplog.clear()
    again = Alarms.of(run, folder, WINDOW)  # from a checkpoint before the first warning
    for _ in range(WINDOW):
        again.add(FINE | bad)
    assert ["cut off" in message for message in caplog.messages] == [True]


TEXTS = {
    "inference0": "serving", "inference1": "starting vLLM", "rollouts": "batch 12: 3 of 8 rollouts",
    "trainer.rank0": "training step 12", "trainer.rank1": "training step 12", "other": "idle",
}  # fmt: skip


def made_row(step: int) -> dict[str, float | None]:
    """Return the metrics of a step: a rise, a collapse from step 30 on, and all that is rare."""
    fallen, wave, broken = step >= 30, round(math.sin(step), 2), float(step % 20 == 19)
    return {
        **STEP,
        "train/reward": None if step == 3 else 0.1 if fallen else 0.1 + step / 50,
        "train/entropy": 0.01 if fallen else 2.0 - step / 40,
        "train/loss": wave / 8, "time/update": 3 + wave, "time/step": 5 + wave, "time/push": 0.5,
        "train/clip_fraction": 0.012, "train/nonfinite": math.inf, "train/skipped": broken,
        "rollout/errors": broken / 8, "rollout/zero_spread": 0.95 * fallen,
        "rollout/truncated": 0.6 * fallen, "rollout/untrained": 0.5 * fallen,
        **({"eval/reward": step / 60, "eval/pass@1": step / 70} if step % 10 == 0 else {}),
    }  # fmt: skip


def test_a_run_in_files_and_on_the_screen(tmp_path, caplog):
    """Metrics of 60 steps: file, step lines, panel in two widths, summary, and alarms."""
    folder, lines = RunFolder(tmp_path / "run"), []
    texts = enumerate(TEXTS.items())
    statuses = {name: ProcessStatus(text, 900.0 + 9 * i, i) for i, (name, text) in texts}
    view = RunView("run", 60, started=600.0, statuses=statuses)
    metrics, memory = MetricsFile(folder), iter([1.0] * 30 + [2.5] * 30)
    facts = learned(advantage_compares=True, loss_reads=["advantages"])
    alarms = Alarms(Learned(**facts), lambda: next(memory))
    for step in range(60):
        metrics.append(step, made_row(step))
        row = read_metrics(folder)[-1] | {"time": 600.0 + 6 * step}
        view.add(row)
        with caplog.at_level(logging.WARNING):
            alarms.add(row)
        lines += [step_line(view, row["time"] + 1)] if step % 7 == 0 or step > 56 else []
        for width in (60, 110) if step in (2, 39, 59) else ():
            console = Console(file=io.StringIO(), width=width, force_terminal=False)
            console.print(live_panel(view, row["time"] + 2))
            lines += console.file.getvalue().splitlines()
    lines += [record.getMessage() for record in caplog.records]
    lines += [re.sub('"time": [^,]*, ', "", folder.metrics.read_text().split("\n")[-2])]
    metrics.truncate_after(40)
    metrics.append(41, {"eval/reward": 0.5, "eval/pass@1": 0.25})
    lines += [str(len(folder.dropped_metrics.read_text().splitlines())), final_summary(folder)]
    golden("trainer/screen", "\n".join(lines).replace(str(tmp_path), ""))


def test_a_table_environments_and_defaults(tmp_path):
    """wandb's table, an evaluation, variables of ranks, and the values of conf/train.yaml."""
    folder = RunFolder(tmp_path)
    call = tool_call("f", x=1)
    said = [[{"role": "user", "content": "q" * n}, call] for n in (3994, 3995, 1, 1, 1, 1, 1)]
    rows = enumerate(said)
    texts = [{"id": i, "messages": m, "advantage": [0.5, i], "reward": i} for i, m in rows]
    folder.rollouts_of(4).write_text("".join(json.dumps(text) + "\n" for text in texts))
    found = {"table": [rollout_rows(folder, 4, count) for count in (3, 9)]}
    played = [PlayedExample(group.example, group.rollouts) for group in MASKED]
    found["evaluated"] = [summarise(played[:n], 1.0).metrics() for n in (1, 4)]
    gpu = Place(host=0, devices=("2",), threads=3, visible=("1", "2"), local_rank=1)
    cpu = replace(gpu, devices=(), visible=(), threads=None)
    for name, place in {"gpu": gpu, "cpu": cpu}.items():
        variables = [_device_environment(place, shared=shared) for shared in (True, False)]
        found[name] = [place.environment(), *variables]
    found["defaults"] = composed("run_name=x", "output_dir=y")
    golden("trainer/run", found)


WANDB_RUN = """
import logging, math, sys
from pathlib import Path
from rl.trainer import loggers
logging.basicConfig(format="%(name)s|%(message)s", level=logging.WARNING)
loggers.WANDB_TIMEOUT_S = 3.0
mode, folder = sys.argv[1:]
tables = {"rollouts_every": 2, "num_rollouts": 4}
logger = loggers.WandbLogger(project="offbyone-test", entity=None, mode=mode, **tables)
logger.start(Path(folder), "my run/1", {"seed": 0})
logger.log(0, {"train/reward": 0.5, "train/loss": math.nan})
logger.log(1, {"train/reward": 0.6, "time/push": 0.1})
logger.finish()
"""


def use_wandb(folder, mode, **environment):
    """Log two steps in a new process without credentials; return our warnings."""
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    home = {"HOME": str(folder), "NETRC": str(folder / "netrc")}
    command = [sys.executable, "-c", WANDB_RUN, mode, str(folder)]
    done = subprocess.run(
        command, env=kept | home | environment, cwd=Path(__file__).parents[3],
        check=True, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    ours = "rl.trainer.loggers|"
    return [line[len(ours) :] for line in done.stderr.splitlines() if line.startswith(ours)]


def test_wandb_offline_writes_below_the_run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    line = {"messages": [{"role": "user", "content": "what?"}], "advantage": 0.5}
    for step in (0, 1):
        RunFolder(folder).rollouts_of(step).write_text(json.dumps(line))
    assert use_wandb(folder, "offline") == []
    (content,) = [path.read_bytes() for path in folder.glob("wandb/offline-run-*/*.wandb")]
    assert b"my-run-1" in content
    assert b"train/reward" in content
    # Only the first of two steps has a table.
    assert len([*folder.glob("wandb/offline-run-*/files/media/table/*.json")]) == 1


def test_wandb_that_cannot_connect_writes_files_and_warns_once(tmp_path):
    no_network = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    (warning,) = use_wandb(tmp_path / "run", "online", **no_network)
    assert warning.startswith("wandb is offline (")
    assert "wandb sync" in warning
    assert list((tmp_path / "run").glob("wandb/offline*/*.wandb"))


class Service:
    """The module wandb, which keeps the logged steps of each run by its id."""

    Settings = dict
    failure = None

    def __init__(self):
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}

    def init(self, *, id, **options):
        self.options = options
        steps = self.runs.setdefault(id, [])

        def log(values, step):
            if self.failure:
                raise self.failure
            if step > max([-1, *(number for number, _ in steps)]):  # others are ignored
                steps.append((step, values))

        return SimpleNamespace(log=log, finish=lambda: None)


def test_a_resumed_wandb_run_has_the_repeated_steps_and_not_the_lost_ones(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setitem(sys.modules, "wandb", service := Service())
    folder = RunFolder(tmp_path)

    def start(first, *rewards):
        metrics = MetricsFile(folder)
        metrics.truncate_after(first - 1)
        options = {"project": "p", "entity": "team", "mode": "offline"}
        logger = WandbLogger(**options, rollouts_every=0, num_rollouts=4)
        logger.start(folder.path, "run", {"seed": 7})
        for step, reward in enumerate(rewards, first):
            metrics.append(step, row := {"r": reward, "train/loss": math.nan, "eval/r": None})
            logger.log(step, row)

    start(0, 0.1, 0.2, 0.3, 0.4)  # the last checkpoint is that after step 1
    start(2, 0.5, 0.6)
    os.utime(folder.wandb_id, (0, 0))  # a copy of the folder may have other times
    start(4, 0.7)  # no step is lost
    given = {"project": "p", "entity": "team", "mode": "offline", "config": {"seed": 7}}
    given |= {"dir": folder.path, "name": "run", "resume": "allow"}
    assert service.options | given == service.options
    old, new = service.runs.values()
    assert old == [(step, {"r": r}) for step, r in enumerate((0.1, 0.2, 0.3, 0.4))]
    assert new == [(step, {"r": r}) for step, r in enumerate((0.1, 0.2, 0.5, 0.6, 0.7))]
    # A service that breaks is left alone, with one warning.
    service.failure = ConnectionError("gone\nand more")
    start(5, 0.8, 0.9)
    assert caplog.messages == ["WandbLogger logs nothing more after an error: gone"]


def test_the_wandb_id_of_a_run_is_legal_and_its_own(tmp_path):
    assert re.fullmatch(r"a-b-c-1-[0-9a-f]{8}", wandb_id(tmp_path, "a/b c:1")[0])
    assert len(wandb_id(tmp_path, "x" * 300)[0]) == 64
    for name in ("a-b", "b-c-1"):  # as in copies of the folder
        copy, is_new = wandb_id(tmp_path, name)
        assert (copy.rpartition("-")[0], is_new) == (name, True)


def curves(folder):
    """Return (step, value) of each metric, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = str(RunFolder(folder).tensorboard)
    plain = EventAccumulator(path).Reload()
    found = {
        name: [(event.step, event.value) for event in plain.Scalars(name)]
        for name in plain.Tags()["scalars"]
    }
    (text,) = plain.Tensors("my run/text_summary")[-1].tensor_proto.string_val
    assert text.decode().strip() == "seed: 0"
    return found


def started(folder, *rewards, first=0):
    """Return a logger that has logged these rewards."""
    logger = TensorBoardLogger()
    logger.start(folder, "my run", {"seed": 0})
    for step, reward in enumerate(rewards, first):
        logger.log(step, {"train/reward": reward})
    return logger


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    lost = started(tmp_path, 0, 1, 2, 3, 4)
    RunFolder(tmp_path).checkpoint(3).mkdir(parents=True)  # killed at step 5: 3 and 4 are lost
    again = started(tmp_path, 30, 40, 50, first=3)  # each step is there as soon as it was logged
    again.log(6, {"train/loss": math.nan, "eval/reward": None})
    expected = [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert curves(tmp_path) == {"train/reward": expected}
    del lost, again  # until then, both files are open
    RunFolder(tmp_path).checkpoint(3).rmdir()  # without a checkpoint, the run starts again
    started(tmp_path, 0, 10).finish()
    assert curves(tmp_path) == {"train/reward": [(0, 0), (1, 10)]}
