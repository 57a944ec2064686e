"""metrics.jsonl: the metrics of a run, one line per step.

    {"step": 12, "time": 1763640000.5, "train/reward": 0.61, "train/grad_norm": null, ...}

`step` counts from 0, as in rollouts/step_000012.jsonl. A checkpoint's name contains the number of
finished steps, which is `step` + 1. `time` is the time of writing in unix seconds. A value that is
not finite is null. This file is always written, even if a logger such as wandb fails.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, TypeAlias

import msgspec

from rl.runtime.files import LineTail, append_line
from rl.runtime.folder import RunFolder
from rl.runtime.text import printable

log = logging.getLogger(__name__)
# Readers skip lines with numbers above _MAX, because the sums of a report would overflow.
_MAX = 1e100
LAST_STEPS = 10  # number of last steps whose mean reward is the training reward of a run
_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Number = Annotated[float, msgspec.Meta(ge=-_MAX, le=_MAX)]
_ROW = msgspec.json.Decoder(dict[str, _Whole | _Number | None])
Row: TypeAlias = dict[str, Any]  # one line of metrics.jsonl; values are numbers or None


class MetricsFile:
    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder, self.path = run_folder, run_folder.metrics
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def append(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append one line. Values above _MAX and values that are not finite become null."""
        row: Row = {"step": step, "time": time.time()}
        values = {name: finite_float(value) for name, value in metrics.items()}
        row |= {k: None if v is None or abs(v) > _MAX else v for k, v in values.items()}
        append_line(self.path, row)

    def truncate_after(self, step: int) -> None:
        """Remove broken lines. Move the lines of steps after `step` to metrics.dropped.jsonl."""
        aside = self.path.with_suffix(".tmp")
        parsed = [_parse_line(line) for line in self.path.read_bytes().splitlines()]
        # Do not warn of an incomplete last line, which is normal after a run was killed.
        for number, row in enumerate(parsed[:-1], 1):
            if row is None:
                log.warning("%s: the resumed run removed the damaged line %d", self.path, number)
        rows = [row for row in parsed if row is not None]
        # Write the dropped lines first, so that a crash may duplicate lines but never lose them.
        if dropped := [row for row in rows if row["step"] > step]:
            with self._run_folder.dropped_metrics.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in dropped)
        with aside.open("w") as kept:
            kept.writelines(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
            kept.flush()
            os.fsync(kept.fileno())  # write the file's content to disk before the rename
        aside.replace(self.path)


class MetricsTail:
    def __init__(self, run_folder: RunFolder) -> None:
        self._tail = LineTail(run_folder.metrics)

    def read(self, max_bytes: int | None = None) -> list[Row]:
        lines = self._tail.read(max_bytes)
        return [row for line in lines if (row := _parse_line(line)) is not None]


def read_metrics(run_folder: RunFolder) -> list[Row]:
    return MetricsTail(run_folder).read()


def _parse_line(line: bytes) -> Row | None:
    try:
        row: Row = _ROW.decode(line)  # msgspec is 10 times faster than json
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not all(map(str.isprintable, row)):  # a control character could change the terminal's state
        row = {printable(name): value for name, value in row.items()}
    return row if type(row.get("step")) is int else None


def finite_float(value: Any) -> float | None:
    """Return the value as a float, or None if it is not a finite number."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def column(rows: list[Row], name: str) -> list[float]:
    """Return the finite values of one metric, oldest first."""
    return [row[name] for row in rows if row.get(name) is not None]


def mean_of(rows: list[Row], name: str) -> float | None:
    values = column(rows, name)
    return sum(values) / len(values) if values else None


def training_reward(rewards: Sequence[float]) -> float | None:
    """Return the mean reward of the last LAST_STEPS steps with a reward, None if there is none."""
    return fmean(rewards[-LAST_STEPS:]) if len(rewards) else None


def stage_seconds(rows: list[Row]) -> dict[str, float]:
    """Return the mean seconds per step of each stage (`wait`, `push`, ...), longest first."""
    names = {name for row in rows for name in row if name.startswith("time/")} - {"time/step"}
    seconds = {name.removeprefix("time/"): sum(column(rows, name)) / len(rows) for name in names}
    return dict(sorted(seconds.items(), key=lambda item: (-item[1], item[0])))


def total_seconds(rows: list[Row]) -> float:
    """Return the total seconds of all steps, without the pauses between a stop and a resume."""
    return sum(column(rows, "time/step")) or len(rows) * sum(stage_seconds(rows).values())


def steps_done(rows: Sequence[Row]) -> int:
    """Return the number of finished steps. A last line with only an evaluation is not a step."""
    if not rows:
        return 0
    only_evaluates = all(name in ("step", "time") or name.startswith("eval/") for name in rows[-1])
    return rows[-1]["step"] + (0 if only_evaluates and len(rows[-1]) > 2 else 1)


def num_steps_done(run_folder: RunFolder) -> int:
    """Return `steps_done` of a run. Read only the last 64 KiB, unless they contain no line."""
    return steps_done(MetricsTail(run_folder).read(1 << 16) or read_metrics(run_folder))
