"""What a page is told of a run, ready for JSON: a table of all rollouts, some of them whole.

A browser holds the table, a few numbers for each rollout by column, and filters it by itself. What
was said, and what training did with each token, it asks for when somebody looks.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import yaml

from rl.run.folder import RunFolder
from rl.run.lock import FolderInUse, FolderUnusable, ensure_free
from rl.viewer.index import RunIndex
from rl.viewer.rollout_lines import whole_characters
from rl.viewer.token_record import tokens_of

COLUMNS = (
    *("step", "source", "group_id", "place", "env", "reward", "advantage", "length", "turns"),
    *("staleness", "push", "stop", "used", "error", "question"),
)
_DIGITS = 5  # behind the point: what a histogram and a label can show


def table(index: RunIndex, start: int = 0, generation: int = 0) -> dict[str, Any]:
    """Return the rows from number `start` on, all of them where the page has another generation."""
    ((now,),) = index.rows("SELECT generation FROM facts")
    if generation != now:
        start = 0
    names = ", ".join(COLUMNS)
    columns = index.columns(f"SELECT {names} FROM viewed WHERE n >= ? ORDER BY n", [start])
    groups = "SELECT question, any_value(title) FROM viewed WHERE n >= ? GROUP BY question"
    return {
        "generation": now,
        "start": start,
        "columns": {name: _listed(values) for name, values in columns.items()},
        "titles": {str(question): title for question, title in index.rows(groups, [start])},
        "scales": dict(index.rows("SELECT step::VARCHAR, slope FROM scales")),
        **facts(index),
    }


def _listed(values: Any) -> list[Any]:
    """A column as JSON has it: null where nothing is."""
    if values.dtype.kind == "f":
        values = np.ma.masked_invalid(np.round(values, _DIGITS))
    return values.tolist()  # None where it is masked


def facts(index: RunIndex) -> dict[str, Any]:
    """What there is to say about the run as a whole."""
    broken = index.rows("SELECT path, number, why FROM broken ORDER BY path, number LIMIT 5")
    ((num_broken,),) = index.rows("SELECT count(*) FROM broken")
    ((num_records,),) = index.rows("SELECT count(*) FROM records")
    going = is_going(index.run_folder)
    problems = [
        f"{_short(path)} line {number} is no rollout: {why}" for path, number, why in broken
    ]
    if num_broken > len(broken):
        problems.append(f"and {num_broken - len(broken)} more lines like that")
    half = "SELECT path FROM files WHERE complete < size"
    if not going:  # else it is being written
        problems += [f"{_short(path)} ends in half a line" for (path,) in index.rows(half)]
    if index.records_problem:
        problems.append(index.records_problem)
    return {
        "name": index.run_folder.name,
        "path": str(index.run_folder.path),
        "going": going,
        "record": num_records > 0,
        "problems": problems,
    }


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def is_going(run_folder: RunFolder) -> bool:
    """Whether somebody trains there now."""
    try:
        ensure_free(run_folder, patience_s=0)  # a page asks every second, and waits for it
    except FolderInUse:
        return True
    except FolderUnusable:
        return False
    return False


def rollouts(index: RunIndex, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return whole lines of rollout files, each with the `n` of its row."""
    query = """
    SELECT n, path, start, r.size, r.id, r.step, f.source FROM rollouts r JOIN files f USING (file)
    WHERE list_contains(?, n) ORDER BY n
    """
    lines = []
    for n, path, start, size, identity, step, source in index.rows(query, [list(numbers)]):
        with Path(path).open("rb") as file:
            file.seek(start)
            line = json.loads(whole_characters(file.read(size)))
        lines.append({**line, "n": n, "id": identity, "step": step, "source": source})
    return lines


def tokens(index: RunIndex, number: int) -> dict[str, Any]:
    """Return a rollout's rows of tokens and what training did with each, or why there are none."""
    found = index.rows("SELECT id, step, source, used FROM viewed WHERE n = ?", [number])
    if not found:
        return {"rows": [], "why": "there is no such rollout"}
    identity, step, source, used = found[0]
    if source == "evaluation":
        return {"rows": [], "why": "evaluations are not trained on, so they have no token record"}
    return tokens_of(index.run_folder, step, identity, used=used, knobs=_loss_knobs(index))


def _loss_knobs(index: RunIndex) -> dict[str, Any]:
    """The numbers that the run's loss was given, to be quoted where it clipped a token."""
    try:
        config = yaml.safe_load(index.run_folder.config.read_text())
        return {k: v for k, v in config["loss"].items() if isinstance(v, int | float)}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return {}


def search(index: RunIndex, text: str) -> list[int]:
    """Return the numbers of the rollouts in which a text occurs, capitals or not."""
    found = index.columns("SELECT n FROM rollouts WHERE contains(text, ?)", [text.lower()])
    return sorted(found["n"].tolist())


def where(index: RunIndex, condition: str) -> list[int]:
    """Return the numbers of the rollouts that meet an SQL condition over the index's columns.

    Raises:
        ValueError: it is none.

    """
    query = f"SELECT n FROM viewed WHERE ({condition}) ORDER BY n"
    try:
        # Whoever has the page's key may look, and not write files in our name.
        if len(duckdb.extract_statements(query)) != 1:
            raise ValueError(f"where={condition!r} is more than a condition")
        return [n for (n,) in index.rows(query)]
    except duckdb.Error as error:
        columns = ", ".join(c for c in COLUMNS if c != "question")
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"where={condition!r} is no condition ({reason}): write it as SQL over {columns}, "
            'such as where="step = 120 AND reward > 0.5"'
        ) from error
