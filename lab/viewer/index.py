"""The index of one run: a row for each rollout, in memory, kept up to date.

    rollouts/*.jsonl  evaluations/*.jsonl  tokens/*.parquet  ->  RunIndex

`refresh` reads only the files that have changed. Rows are numbered from 0 and keep their number, so
a page asks for the rows after the last one it has. If a file was rewritten (a resumed run repeats
steps), everything is read again under another generation, and a page starts over.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from lab.viewer.rollout_lines import Row, SourceFile, rows_of
from rl.runtime.folder import RunFolder, step_of

_STRONG = 0.98  # quantile of the tokens with a gradient
_GRADIENT = ("grad", "slope")  # names of the column; the second in older runs


class _Rewritten(Exception):
    """A file was deleted, or its beginning has changed."""


class RunIndex:
    """The index of a run. Threads may share it if they hold `lock`."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.run_folder = run_folder
        self.generation = 0
        self.records_problem = ""  # why the token record cannot be read
        self.lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self.generation += 1
        self.rows: list[Row] = []
        self.files: dict[Path, SourceFile] = {}
        self.broken: dict[Path, list[str]] = {}
        self.incomplete: set[Path] = set()  # files that end in half a line
        self.scales: dict[int, float | None] = {}  # by step: the |gradient| of a strong token
        self._pushes: dict[int, dict[str, float]] = {}  # by step and rollout
        self._records: dict[Path, int] = {}  # modification time of each file

    def push(self, row: Row) -> float | None:
        """Return how hard training moved a rollout, None without a record."""
        is_trained = row.source == "training" and row.id != ""
        return self._pushes.get(row.step, {}).get(row.id) if is_trained else None

    def refresh(self) -> None:
        """Read what is new."""
        with self.lock:
            try:
                self._refresh_rollouts()
            except _Rewritten:
                self._reset()
                self._refresh_rollouts()
            self._refresh_records()

    def _refresh_rollouts(self) -> None:
        present = source_files(self.run_folder)
        if self.files.keys() - {file.path for file in present}:
            raise _Rewritten
        for file in present:
            if self.files.get(file.path) != file:
                self._read(file)

    def _read(self, file: SourceFile) -> None:
        """Add the rows after those that were read before."""
        rows, broken, is_complete = rows_of(file)
        before = (
            [row for row in self.rows if row.path == file.path] if file.path in self.files else []
        )
        if rows[: len(before)] != before:
            raise _Rewritten
        self.rows += rows[len(before) :]
        self.broken[file.path] = broken
        self.incomplete = (self.incomplete - {file.path}) | (set() if is_complete else {file.path})
        self.files[file.path] = file

    def _refresh_records(self) -> None:
        """Add up what the ranks recorded of each rollout."""
        files = {
            path: path.stat().st_mtime_ns
            for path in sorted(self.run_folder.tokens.glob("step_[0-9]*.trainer.rank*.parquet"))
        }
        steps = {step_of(path) for path, time in files.items() if self._records.get(path) != time}
        for step in sorted(steps):
            paths = [path for path in files if step_of(path) == step]
            try:
                self._pushes[step], self.scales[step] = pushes_of(paths)
            except (OSError, ValueError, pa.ArrowException) as error:
                reason = str(error).splitlines()[0]
                self.records_problem = f"the token record cannot be read: {reason}"
                return
            self._records |= {path: files[path] for path in paths}
        self.records_problem = ""


def source_files(run_folder: RunFolder) -> list[SourceFile]:
    """Return every file of rollouts: training before evaluation, in the order of steps."""
    found = [
        *(("training", path) for path in run_folder.rollouts.glob("step_[0-9]*.jsonl")),
        *(("evaluation", path) for path in run_folder.evaluations.glob("version_[0-9]*.jsonl")),
        *(("evaluation", path) for path in [run_folder.evaluated] if path.is_file()),
    ]
    files = []
    for source, path in found:
        with suppress(FileNotFoundError):  # a resumed run has just deleted the step
            stat, step = path.stat(), 0 if path == run_folder.evaluated else step_of(path)
            files.append(SourceFile(path, source, step, stat.st_mtime_ns, stat.st_size))
    return sorted(files, key=lambda file: (file.source != "training", file.step))


def pushes_of(paths: Iterable[Path]) -> tuple[dict[str, float], float | None]:
    """Return the push of each rollout of a step by id, and the |gradient| of a strong token.

    The push of a rollout is the sum of its tokens' |gradient|. If the step trained on nothing, its
    files have no such column.
    """
    pushes: dict[str, float] = defaultdict(float)
    sizes = [np.empty(0)]
    for path in paths:
        file = parquet.ParquetFile(path)
        for name in set(_GRADIENT) & set(file.schema_arrow.names):
            columns = file.read(columns=["id", name])
            for identity, gradients in zip(columns["id"], columns[name], strict=True):
                size = np.abs(gradients.values.drop_null().to_numpy().astype(np.float64))
                pushes[identity.as_py()] += float(size.sum())
                sizes.append(size)
    positive = np.concatenate(sizes)
    positive = positive[positive > 0]
    return pushes, float(np.quantile(positive, _STRONG)) if len(positive) else None
