"""The numbers of a run: metrics.jsonl, one line a step, and the loggers that carry them elsewhere.

    {"step": 12, "time": 1763640000.5, "train/reward": 0.61, "train/grad_norm": null, ...}

`step` is the step that trained, from 0, as in rollouts/step_000012.jsonl; a checkpoint's number
counts steps done and is one more. `time` is when the line was written, in unix seconds. A number
that is not finite is null. The file is the record and always written; a logger may fail.
"""

import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

Row: TypeAlias = dict[str, Any]  # one line of metrics.jsonl; every value a number or None

FILE = "metrics.jsonl"
WANDB_TIMEOUT_S = 30.0  # for the service to answer at the start, and for uploads at the end

log = logging.getLogger(__name__)


class MetricsFile:
    """metrics.jsonl, open for appending."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a")
        # A killed run may leave half a line; what comes next must not be glued to it.
        if not (self.path.read_bytes() or b"\n").endswith(b"\n"):
            self._file.write("\n")

    def append(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write one line and flush it. A value that is not finite becomes null."""
        row: Row = {"step": step, "time": time.time()}
        row |= {name: finite(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps and any broken line, all at once or not at all."""
        self._file.close()
        aside = self.path.with_suffix(".tmp")
        rows = [row for row in read_metrics(self.path.parent) if row["step"] <= step]
        with aside.open("w") as kept:
            kept.writelines(json.dumps(row) + "\n" for row in rows)
            kept.flush()
            os.fsync(kept.fileno())
        aside.replace(self.path)
        self._file = self.path.open("a")

    def close(self) -> None:
        """Close the file; appending afterwards is an error."""
        self._file.close()


class MetricsTail:
    """Reads metrics.jsonl as it grows."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._offset = 0  # bytes read so far, always the end of a line

    def read(self) -> list[Row]:
        """The complete lines since the last call; from the top again after a truncation."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [row for line in complete.splitlines() if (row := parse_row(line)) is not None]


def read_metrics(folder: Path) -> list[Row]:
    """Every readable line of a run's metrics, in order; a torn or broken line is left out."""
    return MetricsTail(folder).read()


def parse_row(line: bytes) -> Row | None:
    """One line of metrics.jsonl, or None when it is not one."""
    with contextlib.suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            return {name: value if name == "step" else finite(value) for name, value in row.items()}
    return None


def finite(value: Any) -> float | None:
    """The value as a number, or None when it has none."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def column(rows: list[Row], name: str) -> list[float]:
    """The finite values of one metric, oldest first."""
    return [row[name] for row in rows if row.get(name) is not None]


def mean_of(rows: list[Row], name: str) -> float | None:
    """The mean of one metric over the rows that have it."""
    values = column(rows, name)
    return sum(values) / len(values) if values else None


def time_split(rows: list[Row]) -> dict[str, float]:
    """Mean seconds per step by activity (`wait`, `push`, ...), the longest first."""
    names = {name for row in rows for name in row if name.startswith("time/")} - {"time/step"}
    seconds = {name.removeprefix("time/"): sum(column(rows, name)) / len(rows) for name in names}
    return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


def total_seconds(rows: list[Row]) -> float:
    """Seconds the steps took; pauses between a stop and a resume do not count."""
    return sum(column(rows, "time/step")) or len(rows) * sum(time_split(rows).values())


class Logger:
    """What the trainer calls on rank 0; this one does nothing."""

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the copy of this run, or go on with it when the run was resumed."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Copy one step."""

    def finish(self) -> None:
        """Bring what is left to where it goes."""


@dataclass
class ConsoleLogger(Logger):
    """Nothing beyond metrics.jsonl and the screen, which are there anyway."""


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """Weights & Biases. When it fails it goes offline or quiet; the run never notices."""

    project: str
    entity: str | None
    mode: Literal["online", "offline", "disabled"]
    _run: Any = field(default=None, init=False, repr=False)

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the run whose id follows from `run_name`, so that a resumed run continues it."""
        if self.mode == "disabled":
            return
        try:
            self._run = self._init(folder, run_name, config)
        except Exception as error:  # noqa: BLE001 (whatever a service client raises, the run goes on)
            log.warning("wandb is off for this run: %s", first_line(error))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send one step."""
        if self._run is None:
            return
        try:
            values = {name: v for name, v in metrics.items() if finite(v) is not None}
            self._run.log(values, step=step)
        except Exception as error:  # noqa: BLE001 (as above)
            log.warning("wandb is off from step %d on: %s", step, first_line(error))
            self._run = None

    def finish(self) -> None:
        """Upload what is left, for at most WANDB_TIMEOUT_S; the files stay for `wandb sync`."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except Exception as error:  # noqa: BLE001 (as above)
            log.warning("wandb did not finish, its files stay here: %s", first_line(error))

    def _init(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> Any:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S
        )
        opened = partial(
            wandb.init, project=self.project, entity=self.entity, dir=folder, name=run_name,
            id=wandb_id(run_name), resume="allow", config=dict(config), settings=settings,
        )  # fmt: skip
        if self.mode == "online":
            try:
                # Without a prompt: wandb would wait for an answer at a terminal nobody looks at.
                if wandb.login(prompt=False):
                    return opened(mode="online")
                problem = "no key; run `wandb login` or set WANDB_API_KEY"
            except wandb.Error as error:
                problem = first_line(error)
            later = folder / "wandb" / "offline-run-*"
            log.warning("wandb goes offline (%s). Send it later: wandb sync %s", problem, later)
        return opened(mode="offline")


def wandb_id(run_name: str) -> str:
    """The run's id at wandb: its name in the characters and length wandb allows."""
    return re.sub(r"[^\w.-]", "-", run_name)[-64:]


def first_line(error: Exception) -> str:
    """What went wrong, on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
