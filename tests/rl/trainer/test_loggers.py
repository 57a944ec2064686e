"""wandb and TensorBoard, which is read back by its own reader.

An error of a service is one warning and does not end the run.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.trainer.loggers import WandbLogger, wandb_id
from rl.trainer.tensorboard_logger import TensorBoardLogger
from tests.support.wandb_files import records

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
    assert any(b"my-run-1" in path.read_bytes() for path in folder.glob("wandb/off*/*.wandb"))
    steps = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.item}
        for kind, record in records(folder)
        if kind == "history"
    ]
    assert [step["train/reward"] for step in steps] == [0.5, 0.6]
    assert "train/loss" not in steps[0]  # NaN
    # Only the first of two steps has a table.
    assert ["rollouts.path" in step for step in steps] == [True, False]


def test_wandb_that_cannot_connect_writes_files_and_warns_once(tmp_path):
    no_network = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    (warning,) = use_wandb(tmp_path / "run", "online", **no_network)
    assert warning.startswith("wandb is offline (")
    assert "wandb sync" in warning
    assert list((tmp_path / "run").glob("wandb/offline*/*.wandb"))


def test_wandb_that_breaks_during_the_run_is_dropped_with_one_warning(caplog):
    tables = {"rollouts_every": 2, "num_rollouts": 4}
    logger = WandbLogger(project="p", entity=None, mode="offline", **tables)
    logger._run = Mock(log=Mock(side_effect=ConnectionError("gone\nand more")))
    for step in range(3):
        logger.log(step, {"train/reward": 0.5})
    logger.finish()
    assert caplog.messages == ["WandbLogger logs nothing more after an error: gone"]


class Service:
    """The module wandb, which keeps the logged steps of each run by its id."""

    Settings = dict

    def __init__(self):
        self.runs: dict[str, list[tuple[int, float]]] = {}

    def init(self, *, id, **options):
        self.options = options
        steps = self.runs.setdefault(id, [])

        def log(values, step):
            if step > max([-1, *(number for number, _ in steps)]):  # others are ignored
                steps.append((step, values["train/reward"]))

        return SimpleNamespace(log=log, finish=lambda: None)


def test_a_resumed_wandb_run_has_the_repeated_steps_and_not_the_lost_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", service := Service())
    folder = RunFolder(tmp_path)

    def start(first, *rewards):
        metrics = MetricsFile(folder)
        metrics.truncate_after(first - 1)
        options = {"project": "p", "entity": "team", "mode": "offline"}
        logger = WandbLogger(**options, rollouts_every=0, num_rollouts=4)
        logger.start(folder.path, "run", {"seed": 7})
        for step, reward in enumerate(rewards, first):
            metrics.append(step, row := {"train/reward": reward})
            logger.log(step, row)

    start(0, 0.1, 0.2, 0.3, 0.4)  # the last checkpoint is that after step 1
    start(2, 0.5, 0.6)
    os.utime(folder.wandb_id, (0, 0))  # a copy of the folder may have other times
    start(4, 0.7)  # no step is lost
    given = {"project": "p", "entity": "team", "mode": "offline", "config": {"seed": 7}}
    given |= {"dir": folder.path, "name": "run", "resume": "allow"}
    assert service.options | given == service.options
    old, new = service.runs.values()
    assert old == [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4)]
    assert new == [(0, 0.1), (1, 0.2), (2, 0.5), (3, 0.6), (4, 0.7)]


def test_the_wandb_id_of_a_run_is_legal_and_its_own(tmp_path):
    first = wandb_id(tmp_path, "a/b c:1")[0]
    assert re.fullmatch(r"a-b-c-1-[0-9a-f]{8}", first)
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
