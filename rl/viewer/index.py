"""The index of one run: a row for each rollout, in a DuckDB file of its own, kept up to date.

    rollouts/*.jsonl  evaluations/*.jsonl  tokens/*.parquet  ->  <run>/viewer/index.duckdb

Only what is new is read: of a file that grew, the complete lines behind those that are known. Rows
are numbered from 0 and keep their number, so a page asks for those behind the last one it has.
Where a file was written anew (a resumed run does steps again), everything is read again under
another generation, and a page starts over.
"""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from rl.run.folder import RunFolder, step_of
from rl.viewer.rollout_lines import BrokenLine, rows_of
from rl.viewer.tables import (
    ARROW,
    FILES,
    FORMAT,
    PUSHES,
    SCALES,
    TABLES,
    new_generation,
    prepared,
)

_BATCH = 20_000  # rows inserted at once
_TAIL = 64  # bytes by which a file that grew is told from one that was written anew


def _silently(read: int, total: int) -> None:
    """Tell nobody how far it is."""


class _WrittenAnew(Exception):
    """A file does not begin with what is known of it, or is gone."""


@dataclass(frozen=True)
class SourceFile:
    """A file of rollouts, as it is now."""

    path: Path
    source: str  # training, evaluation
    step: int  # or version
    modified: int
    size: int


@dataclass
class _News:
    """What is to be written together."""

    files: list[tuple[Any, ...]] = field(default_factory=list)
    broken: list[tuple[Any, ...]] = field(default_factory=list)
    rollouts: list[tuple[Any, ...]] = field(default_factory=list)


class RunIndex:
    """What is known of a run. Several threads may ask; one at a time gets an answer."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.run_folder = run_folder
        self.not_kept = ""  # why it lives in memory alone, if it does
        self.records_problem = ""  # why the token record cannot be read
        self._lock = threading.RLock()
        self._db = self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        path = self.run_folder.viewer_index
        try:
            path.parent.mkdir(exist_ok=True)
            try:
                return prepared(path)
            except duckdb.Error as error:
                if _is_locked(error):  # another viewer has it
                    raise
                path.unlink()  # broken, or another version's
                return prepared(path)
        except OSError as error:
            self.not_kept = f"{path.parent}: {error.strerror}"
        except duckdb.Error as error:
            why = str(error).splitlines()[0]
            self.not_kept = "another viewer has it" if _is_locked(error) else why
        return prepared(":memory:")

    def close(self) -> None:
        """Let others have the file."""
        with self._lock:
            self._db.close()

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Ask the tables."""
        with self._lock:
            return self._db.execute(query, list(values)).fetchall()

    def columns(self, query: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """Ask the tables for arrays by column name; what is missing is masked."""
        with self._lock:
            return self._db.execute(query, list(values)).fetchnumpy()

    def refresh(self, progress: Callable[[int, int], None] = _silently) -> None:
        """Read what is new. `progress` is told of bytes read, and of how many there are."""
        with self._lock, _no_garbage():
            try:
                self._refresh_rollouts(progress)
            except _WrittenAnew:
                self._clear()
                self._refresh_rollouts(progress)
            self._refresh_records()

    def _refresh_rollouts(self, progress: Callable[[int, int], None]) -> None:
        names = list(FILES)
        known = {row[1]: dict(zip(names, row, strict=True)) for row in self.rows("FROM files")}
        present = source_files(self.run_folder)
        if known.keys() - {str(file.path) for file in present}:
            raise _WrittenAnew
        changed = [file for file in present if not _same(file, known.get(str(file.path)))]
        if not changed:
            return
        total, read = sum(file.size for file in changed), 0
        next_file, news = len(known), _News()
        (count,) = self.rows("SELECT count(*) FROM rollouts")[0]
        with self._transaction():
            for file in changed:
                before = known.get(str(file.path))
                if before is None:
                    before = {"file": next_file, "complete": 0, "lines": 0, "tail": b""}
                    next_file += 1
                for row in self._new_rows(file, before, news):
                    news.rollouts.append((count, before["file"], *row))
                    count += 1
                if len(news.rollouts) >= _BATCH:
                    self._insert("rollouts", news.rollouts)
                read += file.size
                progress(read, total)
            self._insert("rollouts", news.rollouts)
            self._insert("broken", news.broken)
            self._db.execute(
                "DELETE FROM files WHERE list_contains(?, file)", [[row[0] for row in news.files]]
            )
            self._insert("files", news.files)

    def _new_rows(
        self, file: SourceFile, before: dict[str, Any], news: _News
    ) -> Iterator[tuple[Any, ...]]:
        """The rows of the complete lines that are not known yet."""
        content = file.path.read_bytes()
        start, tail = before["complete"], before["tail"]
        if content[start - len(tail) : start] != tail:
            raise _WrittenAnew
        end = content.rfind(b"\n") + 1
        lines = before["lines"] + content.count(b"\n", start, end)
        news.files.append(
            (
                *(before["file"], str(file.path), file.source, file.modified, file.size),
                *(end, lines, content[max(0, end - _TAIL) : end]),
            )
        )
        places = Counter[int]()
        if start:
            counts = "SELECT group_id, count(*) FROM rollouts WHERE file = ? GROUP BY group_id"
            places.update(dict(self.rows(counts, [before["file"]])))
        for row in rows_of(
            content[start:end], offset=start, number=before["lines"], step=file.step, places=places
        ):
            if isinstance(row, BrokenLine):
                news.broken.append((str(file.path), row.number, row.why))
            else:
                yield row

    def _refresh_records(self) -> None:
        """Add up what the ranks noted of each rollout."""
        known = {path: when for path, _, when in self.rows("FROM records")}
        files = [
            (str(path), step_of(path), path.stat().st_mtime_ns)
            for path in sorted(self.run_folder.tokens.glob("step_[0-9]*.trainer.rank*.parquet"))
        ]
        steps = {step for path, step, modified in files if known.get(path) != modified}
        if not steps:
            return
        chosen = [file for file in files if file[1] in steps]
        paths = [path for path, _, _ in chosen]
        try:
            with self._transaction():
                for table in ("records", "pushes", "scales"):
                    wanted = f"DELETE FROM {table} WHERE list_contains(?, step)"
                    self._db.execute(wanted, [sorted(steps)])
                self._insert("records", chosen)
                self._db.execute(PUSHES, [paths])
                self._db.execute(SCALES, [paths])
            self.records_problem = ""
        except duckdb.Error as error:
            self.records_problem = f"the token record cannot be read: {str(error).splitlines()[0]}"

    def _insert(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        """Write rows and forget them."""
        if not rows:
            return
        schema = TABLES[table]
        columns = [
            pa.array(values, ARROW[kind])
            for values, kind in zip(zip(*rows, strict=True), schema.values(), strict=True)
        ]
        self._db.register("news", pa.table(columns, names=list(schema)))
        self._db.execute(f"INSERT INTO {table} FROM news")
        self._db.unregister("news")
        rows.clear()

    def _clear(self) -> None:
        with self._transaction():
            for table in TABLES:
                self._db.execute(f"DELETE FROM {table}")
            self._db.execute("INSERT INTO facts VALUES (?, ?)", [FORMAT, new_generation()])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of a block, or nothing."""
        self._db.begin()
        try:
            yield
        except BaseException:
            self._db.rollback()
            raise
        self._db.commit()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Look for no cycles: decoded lines have none, and the search costs as much as decoding."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_locked(error: duckdb.Error) -> bool:
    return "Could not set lock" in str(error)  # a broken file has its "block" named


def source_files(run_folder: RunFolder) -> list[SourceFile]:
    """Every file of rollouts, training before evaluation, in the order of steps."""
    found = [
        *(("training", path) for path in run_folder.rollouts.glob("step_[0-9]*.jsonl")),
        *(("evaluation", path) for path in run_folder.evaluations.glob("version_[0-9]*.jsonl")),
        *(("evaluation", path) for path in [run_folder.evaluated] if path.is_file()),
    ]
    files = []
    for source, path in found:
        with suppress(FileNotFoundError):  # a step that is done again goes meanwhile
            stat, step = path.stat(), 0 if path == run_folder.evaluated else step_of(path)
            files.append(SourceFile(path, source, step, stat.st_mtime_ns, stat.st_size))
    return sorted(files, key=lambda file: (file.source != "training", file.step))


def _same(file: SourceFile, known: dict[str, Any] | None) -> bool:
    return known is not None and (known["modified"], known["size"]) == (file.modified, file.size)
