"""The record of tokens: Parquet files that are joined by rollout and row, never by position.

    tokens/step_000012.rollouts.parquet         a line for each row of a rollout
        id          of the rollout, as in rollouts/step_000012.jsonl
        row         place of the row among the rollout's, from 0
        token_ids   [L] all tokens of the row
        mask        [L] True where the policy chose the token
        mu          [L] log mu at sampling; NaN where no policy sampled
        version     [L] policy version that sampled it; -1 where none did
        turns       [L] assistant turn, from 0; -1 outside the mask

    tokens/step_000012.trainer.rank0.parquet    a line for each row that this rank trained
        id, row     as above
        pi, ...     [N] of the mask's tokens, in order (rl/learner/observation.py)

A row without a line of a trainer's was not trained: its group was rejected, its rollout cut off, or
nothing of the step counted. A quantity that a run does not have is a missing column. A file is
whole or absent; a step that is done again after a resume has new ones.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.run.folder import RunFolder

log = logging.getLogger(__name__)

SAMPLED = ("token_ids", "mask", "mu", "version", "turns")  # columns of the rollouts process
# Numbers that differ from token to token: byte by byte they compress, as a dictionary they do not.
_CONTINUOUS = {"mu", "pi", "old", "ref", "entropy", "loss", "slope", "candidate_slope"}


@dataclass(frozen=True, eq=False)
class Lines:
    """Rows of rollouts with numbers for their tokens. M: lines, N: tokens of all of them."""

    ids: Sequence[str]  # [M]
    rows: Sequence[int]  # [M]
    lengths: Sequence[int]  # [M] tokens of each; they sum to N
    columns: Mapping[str, NDArray[Any]]  # [N] each, line after line


def write_lines(path: Path, lines: Lines) -> bool:
    """Write a file of the record, whole or not at all; returns whether that could be done.

    A disk that is full costs the record, not the run: whatever else must be written says so itself.
    """
    import pyarrow as pa  # half a second and some MiB, for those who record
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
    aside = path.with_name(f".{path.name}.incomplete")
    # Its annotations know no lists of columns.
    how: dict[str, Any] = {"use_dictionary": rest, "use_byte_stream_split": split}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, aside, compression="zstd", **how)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        # The same sentence at every step: the screen shows it once.
        log.warning(
            "tokens are not recorded (%s): the run goes on, and tries again at the next step. "
            "Make room, or resume it with record=none",
            error.strerror or error,
        )
        return False
    return True


@dataclass(frozen=True, eq=False)
class RecordedRow:
    """One row of a rollout, everything that is known of its tokens side by side. L: its tokens."""

    id: str
    row: int
    columns: dict[str, NDArray[Any]]  # [L] a trainer's are NaN outside the mask
    trained: bool  # False: no trainer's columns


def read_rows(run_folder: RunFolder, step: int, id: str | None = None) -> list[RecordedRow]:
    """Return the recorded rows of a step, or those of one rollout; none where none were recorded.

    Raises:
        ValueError: a trainer's line does not fit the row that it names.

    """
    sampled = _lines(run_folder.tokens_of(step, "rollouts"), id)
    paths = run_folder.tokens.glob(run_folder.tokens_of(step, "trainer.rank*").name)
    trained = {
        (line["id"], line["row"]): (path, line)
        for path in sorted(paths)
        for line in _lines(path, id)
    }
    rows = []
    for line in sampled:
        key = line.pop("id"), line.pop("row")
        path, made = trained.get(key, (None, {}))
        mask = line["mask"]
        for name, values in made.items():
            if name in ("id", "row"):
                continue
            if len(values) != mask.sum():
                raise ValueError(
                    f"{path} has {len(values)} values of {name} for row {key[1]} of rollout "
                    f"{key[0]}, which has {mask.sum()} sampled tokens: these files are of two runs"
                )
            line[name] = np.full(len(mask), np.nan, np.float32)
            line[name][mask] = values
        rows.append(RecordedRow(*key, line, bool(made)))
    return rows


def _lines(path: Path, id: str | None) -> list[dict[str, Any]]:
    """The lines of a file, lists as arrays; none where there is no file."""
    from pyarrow import parquet

    if not path.exists():
        return []
    table = parquet.read_table(path, filters=[("id", "=", id)] if id else None)
    columns = {
        name: table[name].to_pylist()
        if name in ("id", "row")
        else [np.asarray(values.values) for values in table[name]]
        for name in table.column_names
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
