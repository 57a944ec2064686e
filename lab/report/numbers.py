"""Format the numbers of a comparison for report.json, the terminal and the page."""

from collections.abc import Sequence
from math import inf
from typing import Any, TypeAlias

import msgspec
from rich.table import Table

from lab.report.arms import Arm
from lab.report.comparison import Comparison
from lab.report.conclusion import basis, conclusion, describe_power
from lab.report.power import MOST_SEEDS
from lab.report.statistics import BETTER, LEVEL, NUM_DRAWS, WORSE

Record: TypeAlias = dict[str, Any]  # the entry of one arm in report.json

COLUMNS = {  # key in report.json -> title of the column, and format of its values
    "name": ("arm", ""),
    "decision": ("decision", ""),
    "difference": ("difference", "+.3f"),
    "reward": ("score", ".3f"),
    "scored_seeds": ("seeds", ""),
    "minutes": ("minutes", ".1f"),
    "failed": ("unfinished", ""),
    "num_unscored": ("unscored", ""),
    "score": ("with interval", ".3f"),
    "p_value": ("p (Holm)", ".3g"),
    "chance_better": ("P(better)", ".0%"),
    "visible_difference": ("visible from", ".3f"),
    "seeds_needed": ("seeds needed", ",.0f"),
    "interquartile": ("interquartile mean", ".3f"),
}
NUM_TERMINAL_COLUMNS = 7  # the terminal shows only this many columns: the first of COLUMNS


def as_json(comparison: Comparison) -> bytes:
    record = {
        "question": comparison.question or None,
        "conclusion": conclusion(comparison),
        "basis": basis(comparison),
        "visible": describe_power(comparison),
        "looks": comparison.num_looks,
        "measure": comparison.scoring.measure,
        "judged": comparison.scoring.judged,
        "num_questions": len(comparison.scoring.questions),
        "baseline": comparison.baseline.arm.label,
        "smallest_effect": comparison.smallest_effect or None,
        "level": LEVEL,
        "draws": NUM_DRAWS,
        "arms": arm_records(comparison, comparison.arms),
        "left_out": [{"run": run.name, "why": why} for run, why in comparison.left_out],
        "notes": comparison.notes,
    }
    return msgspec.json.format(msgspec.json.encode(record), indent=1)  # msgspec writes NaN as null


def arm_records(comparison: Comparison | None, arms: Sequence[Arm]) -> list[Record]:
    """Return one record per arm, best arm first. Arms without a scored run come last."""
    records: dict[str, Record] = {}
    for result in comparison.by_score if comparison else ():
        numbers = {key: getattr(result, key) for key in COLUMNS if hasattr(result, key)}
        numbers |= {"scores": result.scores.means.tolist(), "undecided_if": result.undecided_if}
        records[result.arm.label] = numbers | {"scored_runs": len(result.runs)}
    for arm in arms:
        records.setdefault(arm.label, {})
        records[arm.label] |= {
            "run": arm.label,
            "name": arm.name,
            "seeds": len(arm.runs),
            "steps": max(run.num_steps for run in arm.runs),
            "failed": sum(not run.finished for run in arm.runs),
            "ended_early": len(arm.ended_early),
            "folders": [str(run.folder) for run in arm.runs if run.folder],
            "errors": [run.cause for run in arm.runs if run.cause],
        }
    return list(records.values())


def table(records: Sequence[Record], num_columns: int = len(COLUMNS)) -> list[list[str]]:
    """Return the column titles and one row per arm, without columns that are empty for all arms."""
    columns = []
    for key, (head, spec) in list(COLUMNS.items())[:num_columns]:
        cells = [_format_cell(record.get(key), spec) for record in records]
        if set(cells) != {"-"}:
            columns.append([head, *cells])
    return [list(row) for row in zip(*columns, strict=True)]


def _format_cell(value: Any, spec: str) -> str:
    is_nan, is_zero_count = value != value, type(value) is int and value == 0
    if spec == COLUMNS["seeds_needed"][1] and value and value > MOST_SEEDS:
        return "more questions" if value == inf else f"> {MOST_SEEDS:,}"
    return "-" if value is None or is_nan or is_zero_count else format(value, spec)


def as_table(records: Sequence[Record]) -> Table:
    heads, *rows = table(records, NUM_TERMINAL_COLUMNS)
    drawn = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        justify = "left" if head in ("arm", "decision") else "right"
        drawn.add_column(head, justify=justify, no_wrap=head != "arm", overflow="fold")
    colours = {BETTER: "green", WORSE: "red", None: "yellow"}
    for record, row in zip(records, rows, strict=True):
        drawn.add_row(*row, style=colours.get(record.get("decision"), ""))
    return drawn
