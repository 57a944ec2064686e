"""The functions of `import offbyone`: compose, train, sample and load_run.

    run = offbyone.train(["loss=cispo", "max_steps=20"])       # python train.py loss=cispo ...
    run.metrics[["step", "train/reward"]]

`train` does what train.py does, and `sample` what evaluate.py does. Both return the results.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import RenderableType
from rich.jupyter import JupyterMixin
from rich.text import Text

from lab.cli.hydra_errors import explain_hydra_error
from lab.cli.launch import add_conf_folder, compose_config
from lab.evaluation.standalone import evaluate, read_summary
from lab.evaluation.table import result_lines
from rl.config.schema import ConfigError
from rl.config.shipped import CONF
from rl.runtime.files import LineTail
from rl.runtime.folder import RunFolder, read_records, step_of
from rl.runtime.given_files import load_yaml
from rl.runtime.metrics import column, read_metrics, steps_done
from rl.runtime.start_record import program
from rl.runtime.text import printable
from rl.runtime.token_files import read_rows
from rl.supervisor.supervise import supervise
from rl.terminal.screen import final_summary

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class Config(JupyterMixin):
    """A composed configuration. To change a value, call `compose` again with other overrides."""

    overrides: list[str]
    values: dict[str, Any]  # nested like the YAML files, with every interpolation resolved

    def __getitem__(self, key: str) -> Any:
        """Return the value of a dotted key, such as config["optim.learning_rate"]."""
        return reduce(lambda node, name: node[name], key.split("."), self.values)

    def __repr__(self) -> str:
        return f"<Config {' '.join(self.overrides) or 'without overrides'}>"

    def __rich__(self) -> Text:
        # With default_flow_style=None, yaml writes a node without nested nodes on one line.
        return Text(yaml.safe_dump(self.values, default_flow_style=None, sort_keys=False))


@dataclass(frozen=True, repr=False)
class Run(JupyterMixin):
    """The results of a run or of an evaluation, which are read from its folder.

    A notebook and `rich.print` show the last lines that train.py or evaluate.py prints.
    """

    folder: RunFolder

    @property
    def metrics(self) -> "DataFrame":
        """Return metrics.jsonl: a row per line, a column per metric. An evaluation has no rows."""
        return _as_frame(read_metrics(self.folder))

    @property
    def rollouts(self) -> "DataFrame":
        """Return one row per rollout, with its step (-1 in an evaluation), messages, reward, ..."""
        files = {step_of(path): path for path in self.folder.rollouts.glob("step_[0-9]*.jsonl")}
        files = dict(sorted(files.items())) or {-1: self.folder.evaluated}
        # LineTail leaves out an incomplete last line, because a run may be writing it.
        read = ((s, read_records(path, LineTail(path).read())) for s, path in files.items())
        return _as_frame([{"step": step, **line} for step, lines in read for line in lines])

    def tokens(self, step: int) -> "DataFrame":
        """Return one row per token and update of a step. docs/token-record.md has the columns."""
        from pandas import DataFrame, concat

        rows = read_rows(self.folder, step)
        keys = [{"id": row.id, "row": row.row, "update": row.update} for row in rows]
        frames = [DataFrame(own | row.columns) for own, row in zip(keys, rows, strict=True)]
        return concat([DataFrame(), *frames], ignore_index=True)

    @property
    def checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint in Hugging Face format, or None."""
        return next(reversed(self.folder.exports()), None)

    def __rich__(self) -> RenderableType:
        if summary := read_summary(self.folder):
            threshold = load_yaml(self.folder.read(self.folder.config))["pass_threshold"]
            return result_lines(summary, threshold, self.folder.path)
        return Text(printable(final_summary(self.folder)))

    def __repr__(self) -> str:
        if summary := read_summary(self.folder):
            return f"<Run {self.folder}: reward {summary.reward:.3f}>"
        rows = read_metrics(self.folder)
        rewards = column(rows, "train/reward")
        last = f", last reward {rewards[-1]:.3f}" if rewards else ""
        return f"<Run {self.folder}: {steps_done(rows)} steps{last}>"


def compose(overrides: Sequence[str] = (), config_name: str = "train") -> Config:
    """Return the configuration `conf/<config_name>.yaml` with overrides such as "loss=cispo".

    conf/ of the current folder may contain more choices. Raise ConfigError for an unknown key or
    choice. `train` checks the values.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    if os.getcwd() not in sys.path:  # makes modules of the current folder importable
        sys.path.append(os.getcwd())
    own = [f"hydra.searchpath=[file://{Path('conf').resolve()}]"] if Path("conf").is_dir() else []
    try:
        with hydra.initialize_config_dir(str(CONF), version_base=None):
            return Config(list(overrides), compose_config(config_name, [*own, *overrides]))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_hydra_error(error, [*add_conf_folder([]), *overrides], config_name) from None


def train(config: Config | Sequence[str]) -> Run:
    """Train until the run ends, and return its results. `config` may be a list of overrides.

    Raise ConfigError or FolderUnusable before the first step, RunFailed after an error or max_time.
    """
    chosen = config if isinstance(config, Config) else compose(config)
    if chosen.values.get("until"):
        raise ConfigError(["until=decided adds runs to a sweep: use train.py --multirun"])
    supervise(
        chosen.values,
        overrides=chosen.overrides,
        command=program("train").split(),
        compose=lambda name: compose((), name).values,
    )
    return _run_of(chosen)


def sample(config: Config | Sequence[str]) -> Run:
    """Sample rollouts of held-out examples with the options of evaluate.py. Return the results."""
    chosen = config if isinstance(config, Config) else compose(config, "evaluate")
    evaluate(chosen.values, overrides=chosen.overrides)
    return _run_of(chosen)


def load_run(path: str | Path) -> Run:
    """Return the results of the run in the folder `path`. Raise ValueError if it has no run."""
    if not RunFolder(Path(path)).is_run:
        raise ValueError(f"{path} is not the folder of a run: use a folder such as outputs/<run>")
    return Run(RunFolder(Path(path)))


def _run_of(config: Config) -> Run:
    return load_run(Path(str(config["output_dir"]), str(config["run_name"])).absolute())


def _as_frame(rows: Sequence[dict[str, Any]]) -> "DataFrame":
    from pandas import DataFrame  # imported here, because the import takes half a second

    return DataFrame(rows)
