"""Loggers copy a run's metrics to a service or to files; metrics.jsonl is always written."""

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import finite

_LONGEST_NAME = 55  # of the 64 characters that wandb takes
WANDB_TIMEOUT_S = 30.0  # for the service to answer at the start, and for uploads at the end

_LONGEST_TEXT = 4000  # characters of a table's cell; rollouts/*.jsonl has the full text
_SHOWN = ("id", "env", "reward", "advantage", "stop_reason", "turns", "tokens", "used")

log = logging.getLogger(__name__)


class Logger:
    """What the trainer calls on rank 0; this one does nothing."""

    is_off = False  # after an error, and after `finish`

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the copy of this run, or continue it after a resume."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Copy one step."""

    def finish(self) -> None:
        """Write or upload what is left."""


def never_fails(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a logger's method: an error becomes one warning and turns the logger off."""

    @wraps(method)
    def guarded(self: Logger, *arguments: Any) -> None:
        if self.is_off:
            return
        try:
            method(self, *arguments)
        except Exception as error:  # noqa: BLE001 a client may raise anything, and the run goes on
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("%s is off from here on: %s", type(self).__name__, first_line)
            self.is_off = True

    return guarded


@dataclass
class ConsoleLogger(Logger):
    """Nothing beyond metrics.jsonl and the screen."""


@dataclass(kw_only=True)
class Loggers(Logger):
    """Several loggers at once."""

    loggers: dict[str, Logger]

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the copies of this run."""
        for logger in self.loggers.values():
            logger.start(folder, run_name, config)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Copy one step to each."""
        for logger in self.loggers.values():
            logger.log(step, metrics)

    def finish(self) -> None:
        """Write or upload what is left."""
        for logger in self.loggers.values():
            logger.finish()


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """Weights & Biases.

    Attributes:
        rollouts_every: steps between two tables of rollouts, 0 for none.
        num_rollouts: rows of such a table.

    """

    project: str
    entity: str | None
    mode: Literal["online", "offline", "disabled"]
    rollouts_every: NonNegativeInt
    num_rollouts: PositiveInt
    _run: Any = field(default=None, init=False, repr=False)
    _folder: RunFolder | None = field(default=None, init=False, repr=False)

    @never_fails
    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the run of this folder, so that a resumed one continues it.

        Without a key or a connection the logger writes to the folder, so that nothing is lost.
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
        self._run = wandb.init(
            project=self.project, entity=self.entity, mode=mode, dir=folder, name=run_name,
            id=wandb_id(folder, run_name), resume="allow", config=dict(config),
            settings=wandb.Settings(
                silent=True, console="off",
                init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S,
            ),
        )  # fmt: skip

    @never_fails
    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send one step."""
        values = {name: v for name, v in metrics.items() if finite(v) is not None}
        self._run.log({**values, **self._table(step)}, step=step)

    @never_fails
    def finish(self) -> None:
        """Upload what is left, for at most WANDB_TIMEOUT_S; the files stay for `wandb sync`."""
        self._run.finish()
        self.is_off = True

    def _table(self, step: int) -> dict[str, Any]:
        """Return a few rollouts of the step, if it is due."""
        if self._folder is None or not self.rollouts_every or step % self.rollouts_every:
            return {}
        rows = rollout_rows(self._folder, step, self.num_rollouts)
        if not rows:
            return {}
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        return {"rollouts": table}


def _login_problem() -> str:
    """Return why nothing can be sent to wandb, or an empty text; never wait for a typed key."""
    import wandb

    try:
        known = wandb.login(prompt=False)
    except wandb.Error as error:
        return str(error).splitlines()[0]
    return "" if known else "no key; run `wandb login` or set WANDB_API_KEY"


def wandb_id(folder: Path, run_name: str) -> str:
    """Return the run's id at wandb, drawn at its first start and stored in its folder.

    It is random because runs in other folders and on other machines may have the same name.
    """
    path = RunFolder(folder).wandb_id
    if not path.exists():
        legal = re.sub(r"[^\w.-]", "-", run_name)[-_LONGEST_NAME:]
        path.write_text(f"{legal}-{secrets.token_hex(4)}\n")
    return path.read_text().strip()


def rollout_rows(run_folder: RunFolder, step: int, count: int) -> list[dict[str, Any]]:
    """Return `count` rollouts of a step, spread evenly over its file; [] without a file."""
    path = run_folder.rollouts_of(step)
    lines = path.read_text().splitlines() if path.exists() else []
    count = min(count, len(lines))
    return [_row(json.loads(lines[i * len(lines) // count])) for i in range(count)]


def _row(line: dict[str, Any]) -> dict[str, Any]:
    messages = line["messages"]
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    numbers = {name: line.get(name) for name in _SHOWN}
    # As text, because a table column has one type.
    numbers["advantage"] = json.dumps(numbers["advantage"])
    return {**numbers, "prompt": _text(messages[:first]), "answer": _text(messages[first:])}


def _text(messages: list[dict[str, Any]]) -> str:
    """Return the text and tool calls, one paragraph per message."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        said = content if isinstance(content, str) else json.dumps(content)
        called = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
        parts.append(f"{message['role']}: {' '.join(filter(None, [said, called]))}")
    text = "\n\n".join(parts)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ..."
