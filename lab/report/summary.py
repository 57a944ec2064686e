"""The numbers of a comparison: report.json, report.csv and the table on the terminal."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from lab.report.arms import Arm
from lab.report.comparison import ArmResult, Comparison
from lab.report.conclusion import conclusion
from lab.report.statistics import LEVEL, NUM_DRAWS, Interval

COLUMNS = ("arm", "seeds", "score", "difference", "interval", "decision", "minutes", "unfinished")


def as_record(comparison: Comparison) -> dict[str, Any]:
    """Return the content of report.json. An unknown number is null."""
    record = {
        "question": comparison.question or None,
        "conclusion": conclusion(comparison),
        "measure": comparison.measure,
        "judged": comparison.judged,
        "num_questions": len(comparison.questions),
        "baseline": comparison.baseline.arm.label,
        "level": LEVEL,
        "draws": NUM_DRAWS,
        "arms": arm_records(comparison, comparison.arms),
        "left_out": [{"run": run.name, "why": why} for run, why in comparison.left_out],
        "notes": list(comparison.notes),
    }
    return _without_nan(record)


def arm_records(comparison: Comparison | None, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Return a record per arm, the best first, arms without a run that counts last."""
    results = comparison.by_score if comparison else []
    by_arm = {id(result.arm): result for result in results}
    ordered = [result.arm for result in results] + [arm for arm in arms if id(arm) not in by_arm]
    return [_without_nan(_arm_record(arm, by_arm.get(id(arm)))) for arm in ordered]


def _arm_record(arm: Arm, result: ArmResult | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "run": arm.label,
        "name": arm.name,
        "seeds": len(arm.runs),
        "reward": result.score.value if result else None,
        "steps": max(run.num_steps for run in arm.runs),
        "minutes": result.minutes if result else 0.0,
        "failed": sum(not run.finished for run in arm.runs),
        "folders": [str(run.folder) for run in arm.runs if run.folder],
        "errors": [run.cause for run in arm.runs if run.cause],
    }
    if result is None:
        return record
    several = result.interquartile
    return record | {
        "scored_seeds": result.scores.num_seeds,
        "scores": [float(score) for score in result.scores.runs],
        "interval": _ends(result.score),
        "difference": result.difference.value,
        "difference_interval": _ends(result.difference),
        "p_value": result.p_value,
        "decision": result.decision or "baseline",
        "chance_better": result.chance_better,
        "visible_difference": result.visible_difference,
        "seeds_needed": result.seeds_needed,
        "interquartile_mean": [several.value, *_ends(several)] if several else None,
        "to_baselines_score": asdict(result.efficiency),
        "mean_height_of_curve": result.area,
    }


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _without_nan(value: Any) -> Any:
    """Return the value with null for numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_csv(comparison: Comparison) -> str:
    """Return a table with one line per run."""
    scores = {
        id(run): score  # not by name, which runs of two folders may share
        for result in comparison.results
        for run, score in zip(result.runs, result.scores.runs, strict=True)
    }
    why = {id(run): reason for run, reason in comparison.left_out}
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(
        ["arm", "seed", "run", "score", "steps", "seconds", "tokens", "left_out", "folder"]
    )
    for arm in comparison.arms:
        for run in arm.runs:
            score = scores.get(id(run), "")
            line = [arm.label, run.seed, run.name, score, run.num_steps, run.seconds, run.tokens]
            writer.writerow([*line, why.get(id(run), ""), run.folder or ""])
    return file.getvalue()


def as_table(comparison: Comparison | None, arms: Sequence[Arm]) -> Table:
    """Return the comparison as a table for the terminal."""
    records = arm_records(comparison, arms)
    columns = COLUMNS if any(record["failed"] for record in records) else COLUMNS[:-1]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        justify = "left" if name in ("arm", "decision") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "arm", overflow="fold")
    for record in records:
        style = {"better": "green", "worse": "red"}.get(record.get("decision", ""), "")
        style = style if record["reward"] is not None else "yellow"
        table.add_row(*cells(record)[: len(columns)], style=style)
    return table


def cells(record: dict[str, Any]) -> list[str]:
    """Return one arm's row of the table."""
    failed = str(record["failed"] or "")
    if record["reward"] is None:
        return [record["name"], "0", "-", "-", "-", "-", "-", failed]
    is_baseline = record["decision"] == "baseline"
    low, high = record["difference_interval"]
    return [
        record["name"],
        str(record["scored_seeds"]),
        f"{record['reward']:.3f}",
        "" if is_baseline else f"{record['difference']:+.3f}",
        "" if low is None else f"{low:+.3f}..{high:+.3f}",
        record["decision"],
        f"{record['minutes']:.1f}",
        failed,
    ]
