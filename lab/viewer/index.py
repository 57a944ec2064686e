"""Index one run in memory: one row per rollout, updated from the run's files.

    rollouts/*.jsonl  evaluations/*.jsonl  tokens/*.parquet  ->  RunIndex

`refresh` reads only changed files. Rows are numbered from 0 and keep their numbers, so a page need
not request all rows again. If a file was rewritten, because a resumed run repeats
steps, all files are read again under a new generation number, and a page reloads all rows.
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
from rl.runtime.given_files import regular_file

_FULL_COLOUR_QUANTILE = 0.98  # tokens above this quantile of |gradient| get the full colour


class _FileRewritten(Exception):
    """Raised if a file was deleted, or if rows that were read earlier have changed."""


class RunIndex:
    """The index of one run. A thread holds `lock` during `refresh` and `answers.table`."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.run_folder = run_folder
        self.generation = 0
        self.records_problem = ""  # why the token record is unreadable, or ""
        self.lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self.generation += 1
        self.rows: list[Row] = []
        self.files: dict[Path, SourceFile] = {}
        self.broken: dict[Path, list[str]] = {}
        self.incomplete: set[Path] = set()  # files whose last line is incomplete
        self.scales: dict[int, float | None] = {}  # step -> smallest |gradient| in full colour
        self._gradient_sums: dict[int, dict[str, float]] = {}  # step -> rollout id -> gradient sum
        self._records: dict[Path, int] = {}  # token file -> its modification time

    def gradient_sum(self, row: Row) -> float | None:
        """Return the sum of |gradient| over a rollout's tokens, or None without a token record."""
        is_trained = row.source == "training" and row.id != ""
        return self._gradient_sums.get(row.step, {}).get(row.id) if is_trained else None

    def refresh(self) -> None:
        with self.lock:
            try:
                self._refresh_rollouts()
            except _FileRewritten:
                self._reset()
                self._refresh_rollouts()
            self._refresh_records()

    def _refresh_rollouts(self) -> None:
        present = source_files(self.run_folder)
        if self.files.keys() - {file.path for file in present}:
            raise _FileRewritten
        for file in present:
            if self.files.get(file.path) != file:
                self._read(file)

    def _read(self, file: SourceFile) -> None:
        """Add the new rows of a file. Raise _FileRewritten if its earlier rows have changed."""
        try:
            rows, broken, is_complete = rows_of(file)
        except OSError as error:
            rows, is_complete = [], True
            broken = [f"{file.path.name} cannot be read: {error.strerror}"]
        # A new file has no earlier rows. A search for them would take quadratic time.
        before = [r for r in self.rows if r.path == file.path] if file.path in self.files else []
        if rows[: len(before)] != before:
            raise _FileRewritten
        self.rows += rows[len(before) :]
        self.broken[file.path] = broken
        self.incomplete = (self.incomplete - {file.path}) | (set() if is_complete else {file.path})
        self.files[file.path] = file

    def _refresh_records(self) -> None:
        files = {}
        for path in sorted(self.run_folder.tokens.glob("step_[0-9]*.trainer.rank*.parquet")):
            with suppress(FileNotFoundError):
                files[path] = regular_file(path, self.run_folder.path).stat().st_mtime_ns
        steps = {step_of(path) for path, time in files.items() if self._records.get(path) != time}
        problems = []
        for step in sorted(steps):
            paths = [path for path in files if step_of(path) == step]
            try:
                self._gradient_sums[step], self.scales[step] = gradient_sums(paths)
            except (OSError, ValueError, pa.ArrowException) as error:
                reason = str(error).splitlines()[0]
                problems.append(f"the token record of step {step} cannot be read: {reason}")
            else:
                self._records |= {path: files[path] for path in paths}
        more = f" (and those of {len(problems) - 1} more steps)" if problems[1:] else ""
        self.records_problem = problems[0] + more if problems else ""


def source_files(run_folder: RunFolder) -> list[SourceFile]:
    """Return all rollout files, training before evaluation, in the order of steps."""
    found = [
        *(("training", path) for path in run_folder.rollouts.glob("step_[0-9]*.jsonl")),
        *(("evaluation", path) for path in run_folder.evaluations.glob("version_[0-9]*.jsonl")),
        ("evaluation", run_folder.evaluated),
    ]
    files = []
    for source, path in found:
        with suppress(FileNotFoundError):  # for example, a resumed run has just deleted it
            stat = regular_file(path, run_folder.path).stat()
            step = -1 if path == run_folder.evaluated else step_of(path)
            files.append(SourceFile(path, source, step, stat.st_mtime_ns, stat.st_size))
    return sorted(files, key=lambda file: (file.source != "training", file.step))


def gradient_sums(paths: Iterable[Path]) -> tuple[dict[str, float], float | None]:
    """Return the sum of |gradient| by rollout id, and the smallest |gradient| in full colour."""
    sums: dict[str, float] = defaultdict(float)
    sizes = [np.empty(0)]
    for path in paths:
        file = parquet.ParquetFile(path)
        if "grad" in file.schema_arrow.names:
            columns = file.read(columns=["id", "grad"], use_threads=False)
            for identity, gradients in zip(columns["id"], columns["grad"], strict=True):
                size = np.abs(gradients.values.drop_null().to_numpy().astype(np.float64))
                sums[identity.as_py()] += float(size.sum())
                sizes.append(size)
    positive = np.concatenate(sizes)
    positive = positive[positive > 0]
    return sums, float(np.quantile(positive, _FULL_COLOUR_QUANTILE)) if len(positive) else None
