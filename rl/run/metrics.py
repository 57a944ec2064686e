"""The numbers of a run: metrics.jsonl, one line a step, and the loggers that carry them elsewhere.

    {"step": 12, "time": 1763640000.5, "train/reward": 0.61, "train/grad_norm": null, ...}

`step` is the step that trained, from 0, as in rollouts/step_000012.jsonl; a checkpoint's number
counts steps done and is one more. `time` is when the line was written, in unix seconds. A number
that is not finite is null. The file is the record and always written; a logger may fail.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from rl.run.folder import RunFolder

_ROW = msgspec.json.Decoder(dict[str, int | float | None])
Row: TypeAlias = dict[str, Any]  # one line of metrics.jsonl; every value a number or None


class MetricsFile:
    """metrics.jsonl, open for appending."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder, self.path = run_folder, run_folder.metrics
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
        """Drop the lines of later steps and any broken line, all at once or not at all.

        Later steps will be done again; their lines are kept elsewhere.
        """
        self._file.close()
        aside = self.path.with_suffix(".tmp")
        rows = read_metrics(self._run_folder)
        # First what is kept elsewhere: a crash in between leaves a line twice, never nowhere.
        if dropped := [row for row in rows if row["step"] > step]:
            with self._run_folder.dropped_metrics.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in dropped)
        with aside.open("w") as kept:
            kept.writelines(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
            kept.flush()
            os.fsync(kept.fileno())  # a rename may reach the disk before what it names
        aside.replace(self.path)
        self._file = self.path.open("a")

    def close(self) -> None:
        """Close the file; appending afterwards is an error."""
        self._file.close()


class MetricsTail:
    """Reads metrics.jsonl as it grows."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._path = run_folder.metrics
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
        # A line that is being written has no end yet: the next call reads it.
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [row for line in complete.splitlines() if (row := parse_row(line)) is not None]


def read_metrics(run_folder: RunFolder) -> list[Row]:
    """Every readable line of a run's metrics, in order; a torn or broken line is left out."""
    return MetricsTail(run_folder).read()


def parse_row(line: bytes) -> Row | None:
    """One line of metrics.jsonl, or None when it is not one."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # a tenth of the time
        row: Row = _ROW.decode(line)
        return row if type(row.get("step")) is int else None
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
