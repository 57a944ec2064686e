"""Loggers that send a run's metrics to a service or files, in addition to metrics.jsonl."""

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from envs.messages import text_of
from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.runtime.files import write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import finite_float, read_metrics

_LONGEST_NAME = 55  # characters; a wandb id has at most 64, and its suffix needs 9
WANDB_TIMEOUT_S = 30.0  # limit for the connection at the start and for the uploads at the end

_LONGEST_TEXT = 4000  # maximum characters in a table cell; rollouts/*.jsonl has the full text
_SHOWN = ("id", "env", "reward", "advantage", "stop_reason", "turns", "tokens", "used")

log = logging.getLogger(__name__)


@dataclass
class Logger:
    """The base class of loggers. Its methods, which the trainer calls on rank 0, do nothing.

    conf/logger/console.yaml uses this class, because metrics.jsonl already has the metrics.
    """

    is_off = False  # True if disabled, after an error, or after `finish`

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the log of this run, or continue it after a resume."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log the metrics of one step."""

    def finish(self) -> None:
        """Write or upload the remaining data, and close the log."""


def turn_off_on_error(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a logger's method, so that an error logs one warning and turns the logger off."""

    @wraps(method)
    def guarded(self: Logger, *arguments: Any) -> None:
        if self.is_off:
            return
        try:
            method(self, *arguments)
        except Exception as error:  # noqa: BLE001 no error of a logger may end the run
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("%s logs nothing more after an error: %s", type(self).__name__, first_line)
            self.is_off = True

    return guarded


@dataclass(kw_only=True)
class Loggers(Logger):
    """A logger that forwards every call to several loggers."""

    loggers: dict[str, Logger]

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        for logger in self.loggers.values():
            logger.start(folder, run_name, config)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        for logger in self.loggers.values():
            logger.log(step, metrics)

    def finish(self) -> None:
        for logger in self.loggers.values():
            logger.finish()


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """The logger for Weights & Biases (conf/logger/wandb.yaml)."""

    project: str
    entity: str | None
    mode: Literal["online", "offline", "disabled"]
    rollouts_every: NonNegativeInt
    num_rollouts: PositiveInt
    _run: Any = field(default=None, init=False, repr=False)
    _folder: RunFolder | None = field(default=None, init=False, repr=False)

    @turn_off_on_error
    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Start the wandb run of this run folder, or resume it.

        wandb cannot remove logged steps. So after a resume that repeats steps, this method starts
        a new wandb run and logs the steps up to the checkpoint again.
        """
        if self.mode == "disabled":
            self.is_off = True
            return
        import wandb

        mode, self._folder = self.mode, RunFolder(folder)
        if mode == "online" and (problem := _login_problem()):
            later = folder / "wandb" / "offline-run-*"
            log.warning("wandb is offline (%s). Send the run later: wandb sync %s", problem, later)
            mode = "offline"
        id, is_new = wandb_id(folder, run_name)
        self._run = wandb.init(
            project=self.project, entity=self.entity, mode=mode, dir=folder, name=run_name,
            id=id, resume="allow", config=dict(config),
            settings=wandb.Settings(
                silent=True, console="off",
                init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S,
            ),
        )  # fmt: skip
        for row in read_metrics(self._folder) if is_new else ():
            self.log(row.pop("step"), {name: v for name, v in row.items() if name != "time"})

    @turn_off_on_error
    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        values = {name: v for name, v in metrics.items() if finite_float(v) is not None}
        self._run.log({**values, **self._rollout_table(step)}, step=step)

    @turn_off_on_error
    def finish(self) -> None:
        """Upload data for at most WANDB_TIMEOUT_S seconds. `wandb sync` can upload the rest."""
        self._run.finish()
        self.is_off = True

    def _rollout_table(self, step: int) -> dict[str, Any]:
        if self._folder is None or not self.rollouts_every or step % self.rollouts_every:
            return {}
        rows = rollout_rows(self._folder, step, self.num_rollouts)
        if not rows:
            return {}
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        return {"rollouts": table}


def _login_problem() -> str:
    import wandb

    try:
        is_logged_in = wandb.login(prompt=False)
    except wandb.Error as error:
        return str(error).splitlines()[0]
    return "" if is_logged_in else "no key; run `wandb login` or set WANDB_API_KEY"


def wandb_id(folder: Path, run_name: str) -> tuple[str, bool]:
    """Return the run's id at wandb, and whether it is new. The folder stores the id.

    The id's random suffix separates runs with the same name. The size of metrics.dropped.jsonl is
    stored beside the id. A resume that repeats steps changes this size, so the run gets a new id.
    """
    path, dropped = RunFolder(folder).wandb_id, RunFolder(folder).dropped_metrics
    size = str(dropped.stat().st_size if dropped.exists() else 0)
    known = path.read_text().split() if path.exists() else []
    legal = re.sub(r"[^\w.-]", "-", run_name)[-_LONGEST_NAME:]
    # A copy of the folder has another name, and must not continue the original's wandb run.
    if is_new := known[1:] != [size] or known[0].rpartition("-")[0] != legal:
        known = [f"{legal}-{secrets.token_hex(4)}", size]
        write_atomically(path, f"{known[0]}\n{size}\n")
    return known[0], is_new


def rollout_rows(run_folder: RunFolder, step: int, count: int) -> list[dict[str, Any]]:
    """Return at most `count` rollouts of a step as table rows, evenly spaced in the step's file."""
    path = run_folder.rollouts_of(step)
    lines = path.read_text().splitlines() if path.exists() else []
    count = min(count, len(lines))
    return [_table_row(json.loads(lines[i * len(lines) // count])) for i in range(count)]


def _table_row(line: dict[str, Any]) -> dict[str, Any]:
    messages = line["messages"]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    numbers = {name: line.get(name) for name in _SHOWN}
    # Store text, because a table column cannot contain both numbers and lists.
    numbers["advantage"] = json.dumps(numbers["advantage"])
    return {**numbers, "prompt": _as_text(messages[:first]), "answer": _as_text(messages[first:])}


def _as_text(messages: list[dict[str, Any]]) -> str:
    text = "\n\n".join(f"{message['role']}: {text_of(message)}" for message in messages)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ..."
