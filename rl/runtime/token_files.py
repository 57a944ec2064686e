"""The token record: Parquet files with values per token. `read_rows` joins them by id and row.

    tokens/step_000012.rollouts.parquet         one line per row of a rollout
    tokens/step_000012.trainer.rank0.parquet    one line per update and row that this rank trained

docs/token-record.md explains the columns. rl/records.py defines those of the first file, and
rl/learner/observation.py those of the second. A trainer file without the column `update` is from an
older version, which recorded the first update only. A file is complete or absent.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.runtime.folder import RunFolder, UnusableFile, naming_damage
from rl.runtime.given_files import regular_file

log = logging.getLogger(__name__)

# These columns are written with a byte-stream split, because their values rarely repeat.
_CONTINUOUS = {"mu", "pi", "old", "ref", "entropy", "loss", "grad", "candidate_grad"}


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of a token file: M lines with N tokens in total."""

    ids: Sequence[str]  # [M]
    rows: Sequence[int]  # [M]
    lengths: Sequence[int]  # [M] number of tokens per line; the sum is N
    columns: Mapping[str, NDArray[Any]]  # name -> [N] values of all lines, concatenated
    updates: Sequence[int] | None = None  # [M] update that trained each line; None: a rollouts file


def write_lines(path: Path, lines: Lines) -> None:
    """Write a token file atomically. Log a warning instead of raising an OSError."""
    import pyarrow as pa  # imported here, because the import takes 0.5 s
    from pyarrow import parquet

    offsets = pa.array(np.concatenate([[0], np.cumsum(lines.lengths)]).astype(np.int32))
    values = {
        name: pa.ListArray.from_arrays(offsets, pa.array(column))
        for name, column in lines.columns.items()
    }
    keys = {"id": pa.array(lines.ids, pa.string()), "row": pa.array(lines.rows, pa.int32())}
    if lines.updates is not None:
        keys["update"] = pa.array(lines.updates, pa.int32())
    table = pa.table({**keys, **values})
    split = [f"{name}.list.element" for name in values if name in _CONTINUOUS]
    dictionary = [*keys, *(f"{name}.list.element" for name in values if name not in _CONTINUOUS)]
    incomplete = path.with_name(f".{path.name}.incomplete")
    encodings: dict[str, Any] = {"use_dictionary": dictionary, "use_byte_stream_split": split}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, incomplete, compression="zstd", **encodings)
        incomplete.replace(path)
    except OSError as error:
        with suppress(OSError):
            incomplete.unlink(missing_ok=True)
        # Use the same text at every step, so that the terminal shows the warning only once.
        log.warning(
            "tokens are not recorded (%s): the run continues and tries again at the next step. "
            "Free disk space, or resume with record=none",
            error.strerror or error,
        )


@dataclass(frozen=True, eq=False)
class RecordedRow:
    """All recorded columns of a rollout's row of L tokens in one update of the row's batch."""

    id: str
    row: int
    update: int  # index of the update in its batch; 0 also if no trainer recorded the row
    sampled: dict[str, NDArray[Any]]  # name -> [L] values from the rollouts process
    # name -> [L] values from a trainer, NaN outside the mask; {} if no trainer recorded the row
    trained: dict[str, NDArray[Any]]

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return self.sampled | self.trained


def read_rows(run_folder: RunFolder, step: int, id: str | None = None) -> list[RecordedRow]:
    """Return the recorded rows of a step, each once per update. `id`: only those of this rollout.

    Raise ValueError if a file is damaged, or if the files come from different runs.
    """
    with naming_damage(run_folder.tokens_of(step, "*"), "delete the files of this step"):
        return _read_rows(run_folder, step, id)


def _read_rows(run_folder: RunFolder, step: int, id: str | None) -> list[RecordedRow]:
    paths = run_folder.tokens.glob(run_folder.tokens_of(step, "trainer.rank*").name)
    trained: dict[tuple[str, int], list[tuple[Path, int, dict[str, Any]]]] = defaultdict(list)
    for path in sorted(paths):
        for line in _read_lines(run_folder, path, id):
            trained[line.pop("id"), line.pop("row")].append((path, line.pop("update", 0), line))
    rows = []
    for sampled in _read_lines(run_folder, run_folder.tokens_of(step, "rollouts"), id):
        key, mask = (sampled.pop("id"), sampled.pop("row")), sampled["mask"]
        for path, update, columns in trained.get(key, [(None, 0, {})]):
            by_token = {}
            for name, values in columns.items():
                if len(values) != mask.sum():
                    raise UnusableFile(
                        f"{path} has {len(values)} values of {name} for row {key[1]} of rollout "
                        f"{key[0]}, but this row has {mask.sum()} sampled tokens: the files come "
                        "from different runs, so delete the files of this step"
                    )
                by_token[name] = np.full(len(mask), np.nan, np.float32)
                by_token[name][mask] = values
            rows.append(RecordedRow(*key, update, sampled, by_token))
    return rows


def _read_lines(run_folder: RunFolder, path: Path, id: str | None) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        source = regular_file(path, run_folder.path)
    except FileNotFoundError:
        return []
    with naming_damage(path, "delete it"):
        # Do not use parquet.read_table, because its parallel scan of a damaged file may never end.
        table = parquet.ParquetFile(source).read(use_threads=False)
        if id:
            mine = [one == id for one in table["id"].to_pylist()]
            table = table.filter(pa.array(mine, pa.bool_()))
        columns = {
            name: table[name].to_pylist()
            if name in ("id", "row", "update")
            else [np.asarray(values.values) for values in table[name]]
            for name in map(str, table.column_names)
        }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
