"""The token record: Parquet files that are joined by rollout and row, never by position.

    tokens/step_000012.rollouts.parquet         one line per row of a rollout
        id          of the rollout, as in rollouts/step_000012.jsonl
        row         position of the row among the rows of the rollout, from 0
        token_ids   [L] all tokens of the row
        mask        [L] True where the policy chose the token
        mu          [L] log mu at sampling; NaN where no policy sampled
        version     [L] policy version that sampled it; -1 where no policy did
        turns       [L] assistant turn, from 0; -1 outside the mask

    tokens/step_000012.trainer.rank0.parquet    one line per row that this rank trained
        id, row     as above
        pi, ...     [N] of the mask's tokens, in order (rl/learner/observation.py)

The token columns of rl/records.py say which columns the first file has. A row without a line in a
trainer's file was not trained: its group was rejected, its rollout was cut off, or no token of the
step counted. A quantity that a run does not have is a missing column. A file is complete or absent.
If a resumed run repeats a step, it replaces the step's files.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.runtime.folder import RunFolder

log = logging.getLogger(__name__)

# Their values differ from token to token: split by byte they compress, in a dictionary they do not.
_CONTINUOUS = {"mu", "pi", "old", "ref", "entropy", "loss", "grad", "candidate_grad"}
_RENAMED = {"slope": "grad", "candidate_slope": "candidate_grad"}  # names in files of format 1


@dataclass(frozen=True, eq=False)
class Lines:
    """Rows of rollouts with numbers for their tokens. M: lines, N: tokens of all of them."""

    ids: Sequence[str]  # [M]
    rows: Sequence[int]  # [M]
    lengths: Sequence[int]  # [M] tokens of each; they sum to N
    columns: Mapping[str, NDArray[Any]]  # [N] each, line after line


def write_lines(path: Path, lines: Lines) -> bool:
    """Write a file of the record, complete or not at all; return whether it was written.

    If the disk is full, the run loses the record and goes on.
    """
    import pyarrow as pa  # here, because the import takes half a second
    from pyarrow import parquet

    offsets = pa.array(np.concatenate([[0], np.cumsum(lines.lengths)]).astype(np.int32))
    values = {
        name: pa.ListArray.from_arrays(offsets, pa.array(column))
        for name, column in lines.columns.items()
    }
    table = pa.table(
        {
            "id": pa.array(lines.ids, pa.string()),
            "row": pa.array(lines.rows, pa.int32()),
            **values,
        }
    )
    split = [f"{name}.list.element" for name in values if name in _CONTINUOUS]
    rest = ["id", "row", *(f"{name}.list.element" for name in values if name not in _CONTINUOUS)]
    incomplete = path.with_name(f".{path.name}.incomplete")
    # pyarrow's annotations do not allow lists of columns.
    encodings: dict[str, Any] = {"use_dictionary": rest, "use_byte_stream_split": split}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, incomplete, compression="zstd", **encodings)
        incomplete.replace(path)
    except OSError as error:
        with suppress(OSError):
            incomplete.unlink(missing_ok=True)
        # The same text at every step, because the screen shows equal warnings once.
        log.warning(
            "tokens are not recorded (%s): the run goes on, and tries again at the next step. "
            "Make room, or resume it with record=none",
            error.strerror or error,
        )
        return False
    return True


@dataclass(frozen=True, eq=False)
class RecordedRow:
    """One row of a rollout with all recorded columns of its tokens. L: its tokens."""

    id: str
    row: int
    sampled: dict[str, NDArray[Any]]  # [L] columns of the rollouts process
    trained: dict[str, NDArray[Any]]  # [L] columns of a trainer, NaN outside the mask; or empty

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """All columns."""
        return self.sampled | self.trained


def read_rows(run_folder: RunFolder, step: int, id: str | None = None) -> list[RecordedRow]:
    """Return the recorded rows of a step, or those of one rollout; none where none were recorded.

    Raises:
        ValueError: a trainer's line does not fit the row that it names.

    """
    paths = run_folder.tokens.glob(run_folder.tokens_of(step, "trainer.rank*").name)
    trained = {
        (line.pop("id"), line.pop("row")): (path, line)
        for path in sorted(paths)
        for line in _lines(path, id)
    }
    rows = []
    for sampled in _lines(run_folder.tokens_of(step, "rollouts"), id):
        key = sampled.pop("id"), sampled.pop("row")
        path, columns = trained.get(key, (None, {}))
        mask, by_token = sampled["mask"], {}
        for name, values in columns.items():
            if len(values) != mask.sum():
                raise ValueError(
                    f"{path} has {len(values)} values of {name} for row {key[1]} of rollout "
                    f"{key[0]}, which has {mask.sum()} sampled tokens: these files are of two runs"
                )
            by_token[name] = np.full(len(mask), np.nan, np.float32)
            by_token[name][mask] = values
        rows.append(RecordedRow(*key, sampled, by_token))
    return rows


def _lines(path: Path, id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file, lists as arrays; none if the file does not exist."""
    from pyarrow import parquet

    if not path.exists():
        return []
    table = parquet.read_table(path, filters=[("id", "=", id)] if id else None)
    columns = {
        _RENAMED.get(name, name): table[name].to_pylist()
        if name in ("id", "row")
        else [np.asarray(values.values) for values in table[name]]
        for name in map(str, table.column_names)
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
