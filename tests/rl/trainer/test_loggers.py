"""Loggers: a service that fails is a warning, never the end of a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rl.trainer.loggers import ConsoleLogger, WandbLogger, wandb_id


def test_the_console_logger_has_nothing_to_do(tmp_path):
    logger = ConsoleLogger()
    logger.start(tmp_path, "name", {})
    logger.log(0, {"a": 1.0})
    logger.finish()
    assert list(tmp_path.iterdir()) == []


WANDB_RUN = """
import logging, math, sys
from pathlib import Path
from rl.trainer import loggers
logging.basicConfig(format="%(name)s|%(message)s", level=logging.WARNING)
loggers.WANDB_TIMEOUT_S = 3.0
mode, folder = sys.argv[1:]
logger = loggers.WandbLogger(project="offbyone-test", entity=None, mode=mode)
logger.start(Path(folder), "my run/1", {"seed": 0})
logger.log(0, {"train/reward": 0.5, "train/loss": math.nan})
logger.log(1, {"train/reward": 0.6})
logger.finish()
"""


def use_wandb(folder, mode, **environment):
    """Log two steps in a process of its own, without credentials; returns what we warned of."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    home = {"HOME": str(folder), "NETRC": str(folder / "netrc")}
    command = [sys.executable, "-c", WANDB_RUN, mode, str(folder)]
    done = subprocess.run(
        command, env=kept | home | environment, cwd=Path(__file__).parents[3],
        check=True, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return [
        line[11:] for line in done.stderr.splitlines() if line.startswith("rl.trainer.loggers|")
    ]


def logged(folder):
    """The files that wandb wrote, as one string of bytes."""
    return b"".join(path.read_bytes() for path in folder.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_offline_writes_below_the_run_folder(tmp_path):
    assert use_wandb(tmp_path / "run", "offline") == []
    assert b"train/reward" in logged(tmp_path / "run")
    assert b"my-run-1" in logged(tmp_path / "run")


def test_wandb_without_a_key_goes_offline_with_one_warning(tmp_path):
    (warning,) = use_wandb(tmp_path / "run", "online")
    assert "no key" in warning
    assert "wandb sync" in warning
    assert b"train/reward" in logged(tmp_path / "run")


def test_wandb_without_a_network_goes_offline_with_one_warning(tmp_path):
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    (warning,) = use_wandb(tmp_path / "run", "online", **nobody)
    assert "127.0.0.1:9" in warning
    assert "wandb sync" in warning
    assert b"train/reward" in logged(tmp_path / "run")


def test_wandb_disabled_leaves_no_trace(tmp_path):
    assert use_wandb(tmp_path / "run", "disabled") == []
    assert list((tmp_path / "run").iterdir()) == []


def test_wandb_that_breaks_during_the_run_is_dropped_with_one_warning(caplog):
    class Broken:
        def log(self, values, step):
            raise ConnectionError("gone\nand more")

    logger = WandbLogger(project="p", entity=None, mode="offline")
    logger._run = Broken()
    for step in range(3):
        logger.log(step, {"train/reward": 0.5})
    logger.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb is off from step 0 on: gone"
    ]


def test_the_wandb_id_of_a_run_is_legal_its_own_and_always_the_same(tmp_path):
    first = wandb_id(tmp_path, "a/b c:1")
    assert first == wandb_id(tmp_path, "a/b c:1")
    assert re.fullmatch(r"a-b-c-1-[0-9a-f]{8}", first)
    (tmp_path / "elsewhere").mkdir()
    other = wandb_id(tmp_path / "elsewhere", "x" * 300)
    assert other != wandb_id(tmp_path, "x" * 300)
    assert len(other) == 64
