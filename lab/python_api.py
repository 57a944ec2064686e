"""The functions of `import offbyone`: compose, train, sample and load_run.

    run = offbyone.train(["loss=cispo", "max_steps=20"])
    run.metrics[["step", "train/reward"]]

A list of overrides is what a command line has: `python train.py loss=cispo max_steps=20`.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from lab.cli.hydra_errors import explain_hydra_error
from lab.cli.launch import as_hydra_config, resolved
from lab.evaluation.standalone import evaluate
from rl.config.shipped import CONF
from rl.runtime.folder import RunFolder, step_of
from rl.runtime.given_files import load_yaml
from rl.runtime.metrics import read_metrics, steps_done
from rl.runtime.start_record import program
from rl.runtime.token_files import read_rows
from rl.supervisor.supervise import supervise

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Config:
    """A composed configuration. To change a value, compose again with another override."""

    overrides: tuple[str, ...]
    values: dict[str, Any]  # nested as the YAML files are; interpolations are resolved

    def __getitem__(self, key: str) -> Any:
        """Return the value of a dotted key, such as config["optim.learning_rate"]."""
        return reduce(lambda node, part: node[part], key.split("."), self.values)

    def __repr__(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Run:
    """The results of a run or of an evaluation, read from the files of its folder."""

    path: Path

    @property
    def folder(self) -> RunFolder:
        """The paths of all files of the run."""
        return RunFolder(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the run."""
        return load_yaml(self.folder.read(self.folder.config))

    @property
    def metrics(self) -> "DataFrame":
        """One row per step, one column per metric. An evaluation has no rows."""
        return _frame(read_metrics(self.folder))

    @property
    def rollouts(self) -> "DataFrame":
        """One row per rollout, with its messages, reward and advantage.

        The column `step` is missing for an evaluation.
        """
        paths = sorted(self.folder.rollouts.glob("step_[0-9]*.jsonl"), key=step_of)
        lines = [
            {"step": step_of(path), **json.loads(line)}
            for path in paths
            for line in self.folder.read(path).splitlines()
        ]
        evaluated = self.folder.evaluated
        if not paths and evaluated.exists():
            lines = [json.loads(line) for line in self.folder.read(evaluated).splitlines()]
        return _frame(lines)

    def tokens(self, step: int) -> "DataFrame":
        """Return one row per recorded token of a step. docs/token-record.md lists the columns."""
        columns = [
            {"id": row.id, "row": row.row, "update": row.update, **row.columns}
            for row in read_rows(self.folder, step)
        ]
        frame = _frame(columns)
        return frame.explode([name for name in frame if name not in ("id", "row", "update")])

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint in Hugging Face format, None if there is none."""
        return next(reversed(self.folder.exports()), None)

    def __repr__(self) -> str:
        rewards = self.metrics.get("train/reward")
        reward = "" if rewards is None else f", last reward {rewards.dropna().iloc[-1]:.3f}"
        return f"<Run {self.path}: {steps_done(read_metrics(self.folder))} steps{reward}>"


def compose(overrides: Sequence[str] = (), config_name: str = "train") -> Config:
    """Return the configuration of conf/<config_name>.yaml with these overrides.

    As on the command line, the current folder may have choices of its own in conf/. Each call
    makes a new run name, unless the overrides contain one. The values are checked by `train`.

    Raises:
        ConfigError: an override names no existing key or choice.
    """
    if os.getcwd() not in sys.path:  # makes modules of the current folder importable
        sys.path.append(os.getcwd())
    own = [f"hydra.searchpath=[file://{Path('conf').resolve()}]"] if Path("conf").is_dir() else []
    try:
        with initialize_config_dir(str(CONF), version_base=None):
            config = hydra_compose(config_name, [*own, *overrides], return_hydra_config=True)
            with as_hydra_config(config):
                return Config(tuple(overrides), resolved(config))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_hydra_error(error, list(overrides), config_name) from None


def train(config: Config | Sequence[str]) -> Run:
    """Train until the run ends, and return its results. Interrupt it like a command: Ctrl-C.

    Raises:
        ConfigError: the configuration cannot work. No step was done.
        RunFailed: the run ended early because of an error.
    """
    chosen = config if isinstance(config, Config) else compose(config)
    supervise(
        chosen.values,
        overrides=list(chosen.overrides),
        command=program("train"),
        compose=lambda name: compose((), name).values,
    )
    return _run_of(chosen)


def sample(config: Config | Sequence[str]) -> Run:
    """Sample rollouts of a model with the options of evaluate.py, and return them.

        sample([f"model.path={run.checkpoint}", "env=arithmetic", "num_examples=8"]).rollouts

    Raises:
        ConfigError: the configuration cannot work.
        RunFailed: the evaluation ended early because of an error.
    """
    chosen = config if isinstance(config, Config) else compose(config, "evaluate")
    evaluate(chosen.values, overrides=list(chosen.overrides))
    return _run_of(chosen)


def load_run(path: str | Path) -> Run:
    """Return the results in the folder of a run. Raise ValueError if it is not such a folder."""
    if not RunFolder(Path(path)).is_run:
        raise ValueError(f"{path} is not the folder of a run: use a folder such as outputs/<run>")
    return Run(Path(path))


def _run_of(config: Config) -> Run:
    return Run(Path(str(config["output_dir"]), str(config["run_name"])).absolute())


def _frame(rows: Sequence[dict[str, Any]]) -> "DataFrame":
    from pandas import DataFrame  # imported here, because the import takes half a second

    return DataFrame(rows)
