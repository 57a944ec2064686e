"""Answer the requests of the viewer's page, which lists all rollouts and shows some in full.

A row number is the index of a rollout in `RunIndex.rows`.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lab.viewer.index import Row, RunIndex
from lab.viewer.rollout_lines import without_surrogates
from lab.viewer.token_record import tokens_of
from rl.runtime.lock import FolderInUse, ensure_free
from rl.runtime.token_files import RecordedRow, read_rows

COLUMNS = (
    *("step", "source", "group_id", "place", "env", "reward", "advantage", "length", "turns"),
    *("staleness", "push", "stop", "used", "error", "question", "new"),
)
_MAX_BROKEN = 5  # maximum number of unreadable lines that a page lists


def table(index: RunIndex, start: int = 0, generation: int = 0) -> dict[str, Any]:
    """Return the table from row number `start` on, with a summary of the run.

    The page passes the `generation` of its rows. If this is not the current one, return all rows.
    """
    with index.lock:
        if generation != index.generation:
            start = 0
        rows = index.rows[start:]
        gradients = [index.gradient_sum(row) for row in rows]
        return {
            "generation": index.generation,
            "start": start,
            "columns": {
                name: gradients if name == "push" else [getattr(row, name) for row in rows]
                for name in COLUMNS
            },
            "titles": {str(row.question): row.title for row in rows},
            "scales": {str(step): x for step, x in index.scales.items() if x is not None},
            **run_summary(index),
        }


def run_summary(index: RunIndex) -> dict[str, Any]:
    going = False
    try:
        ensure_free(index.run_folder, patience_s=0)  # no retry, because the page asks every second
    except FolderInUse:
        going = True
    broken = [line for path in sorted(index.broken) for line in index.broken[path]]
    problems, more = broken[:_MAX_BROKEN], len(broken) - _MAX_BROKEN
    problems += [f"and {more} more unreadable lines"] if more > 0 else []
    if not going:  # an active run may still be writing its last line
        names = ["/".join(path.parts[-2:]) for path in sorted(index.incomplete)]
        problems += [f"{name} ends with an incomplete line" for name in names]
    problems += filter(None, [index.records_problem])
    return {
        "name": index.run_folder.name,
        "path": str(index.run_folder.path),
        "going": going,
        "record": bool(index.scales),
        "problems": problems,
    }


def rollouts(index: RunIndex, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the full lines of the rollouts with these row numbers, each with its number as `n`."""
    lines = []
    for n in sorted(numbers):
        row = index.rows[n]
        with row.path.open("rb") as file:
            file.seek(row.start)
            line = json.loads(without_surrogates(file.read(row.size)))
        lines.append({**line, "n": n, "id": row.id, "step": row.step, "source": row.source})
    return lines


def tokens(index: RunIndex, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return the token record of each rollout as {rows, why} (see `token_record.tokens_of`)."""
    run = index.run_folder
    loss = run.read_yaml(run.config).get("loss")
    loss = loss if isinstance(loss, dict) else {}
    options = {name: value for name, value in loss.items() if isinstance(value, int | float)}
    only = index.rows[numbers[0]].id if len(numbers) == 1 else None

    @cache
    def rows_by_id(step: int) -> Mapping[str, list[RecordedRow]]:
        by_id = defaultdict(list)
        for row in read_rows(run, step, only):
            by_id[row.id].append(row)
        return by_id

    def answer_for(row: Row) -> dict[str, Any]:
        if row.source == "evaluation":
            why = "evaluations are not trained on, so they have no token record"
            return {"rows": [], "why": why}
        return tokens_of(run, row.step, row.id, rows_by_id, used=row.used, options=options)

    return [answer_for(index.rows[number]) for number in numbers]


def search(index: RunIndex, text: str) -> list[int]:
    return [n for n, row in enumerate(index.rows) if text.lower() in row.text]


def row_numbers_with(index: RunIndex, wanted: Mapping[str, str]) -> list[int]:
    return [
        n
        for n, row in enumerate(index.rows)
        if all(str(getattr(row, name)) == value for name, value in wanted.items())
    ]
