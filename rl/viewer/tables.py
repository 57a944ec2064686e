"""The tables of the viewer's index, and the SQL that goes with them."""

import time
from pathlib import Path

import duckdb
import pyarrow as pa

FORMAT = 2  # of the index; another one is thrown away

Schema = dict[str, str]
ROLLOUTS: Schema = {
    **{"n": "BIGINT", "file": "INTEGER", "start": "BIGINT", "size": "BIGINT"},
    **{"step": "INTEGER", "group_id": "BIGINT", "place": "INTEGER", "id": "VARCHAR"},
    **{"example": "VARCHAR", "env": "VARCHAR", "reward": "DOUBLE", "advantage": "DOUBLE"},
    **{"length": "INTEGER", "turns": "INTEGER", "staleness": "INTEGER", "stop": "VARCHAR"},
    **{"used": "BOOLEAN", "error": "BOOLEAN", "question": "BIGINT", "title": "VARCHAR"},
    "text": "VARCHAR",
}
FILES: Schema = {
    **{"file": "INTEGER", "path": "VARCHAR", "source": "VARCHAR", "modified": "BIGINT"},
    **{"size": "BIGINT", "complete": "BIGINT", "lines": "INTEGER", "tail": "BLOB"},
}
BROKEN: Schema = {"path": "VARCHAR", "number": "INTEGER", "why": "VARCHAR"}
RECORDS: Schema = {"path": "VARCHAR", "step": "INTEGER", "modified": "BIGINT"}
TABLES: dict[str, Schema] = {
    "facts": {"format": "INTEGER", "generation": "BIGINT"},
    "files": FILES,
    "rollouts": ROLLOUTS,
    "broken": BROKEN,
    "records": RECORDS,
    "pushes": {"step": "INTEGER", "id": "VARCHAR", "push": "DOUBLE"},
    "scales": {"step": "INTEGER", "slope": "DOUBLE"},
}
ARROW = {
    **{"BIGINT": pa.int64(), "INTEGER": pa.int32(), "DOUBLE": pa.float64()},
    **{"BOOLEAN": pa.bool_(), "VARCHAR": pa.string(), "BLOB": pa.binary()},
}
# What ranks recorded. Where nothing of a step was trained, its files lack even the slope.
_RECORDED = """(
    FROM read_parquet(?, union_by_name = true, filename = true)
    UNION ALL BY NAME SELECT NULL::FLOAT[] AS slope WHERE false
) t JOIN records r ON r.path = t.filename
"""
# A rollout's push: the sum of its tokens' |slope|. A step's scale: the |slope| of a strong token.
PUSHES = f"""
INSERT INTO pushes SELECT step, id, sum(list_sum([abs(x) for x in slope]))
FROM {_RECORDED} GROUP BY ALL
"""
SCALES = f"""
INSERT INTO scales SELECT step, quantile_cont(slope, 0.98) FROM (
    SELECT step, abs(unnest(slope)) slope FROM {_RECORDED}
) WHERE slope > 0 GROUP BY step
"""
VIEW = """
CREATE VIEW viewed AS
    SELECT r.* EXCLUDE (file, start, size), f.source, p.push
    FROM rollouts r JOIN files f USING (file)
    LEFT JOIN pushes p ON f.source = 'training' AND p.step = r.step AND p.id = r.id AND p.id != ''
"""


def new_generation() -> int:
    """A number by which a page tells one index of a run from another."""
    return time.time_ns() // 1000  # a browser keeps 53 bits


def prepared(path: Path | str) -> duckdb.DuckDBPyConnection:
    """Return a connection whose tables are there; duckdb.Error where they are another format's."""
    db = duckdb.connect(str(path))
    try:
        if not db.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'facts'").fetchall():
            for table, schema in TABLES.items():
                columns = ", ".join(f"{name} {kind}" for name, kind in schema.items())
                db.execute(f"CREATE TABLE {table} ({columns})")
            db.execute(VIEW)
            # Two indexes of one run never share a generation: a page tells them apart by it.
            db.execute("INSERT INTO facts VALUES (?, ?)", [FORMAT, new_generation()])
        if db.execute("SELECT format FROM facts").fetchall() != [(FORMAT,)]:
            raise duckdb.InvalidInputException("an index of another format")
    except duckdb.Error:
        db.close()
        raise
    return db
