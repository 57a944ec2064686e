"""A comparison as numbers for others: report.json, report.csv, and the table of a terminal."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from rl.report.arms import Arm
from rl.report.comparison import ArmResult, Comparison
from rl.report.sentence import sentence
from rl.report.statistics import LEVEL, NUM_DRAWS, Interval

COLUMNS = ("arm", "seeds", "score", "difference", "interval", "verdict", "minutes", "unfinished")


def as_record(comparison: Comparison, arms: Sequence[Arm]) -> dict[str, Any]:
    """What report.json holds; what is not known is null."""
    record = {
        "question": comparison.question or None,
        "sentence": sentence(comparison),
        "measure": comparison.measure,
        "judged": comparison.judged,
        "num_questions": len(comparison.questions),
        "baseline": comparison.baseline.arm.label,
        "level": LEVEL,
        "draws": NUM_DRAWS,
        "arms": arm_lines(comparison, arms),
        "left_out": [{"run": run.name, "why": why} for run, why in comparison.left_out],
        "notes": list(comparison.notes),
    }
    return _known(record)


def arm_lines(comparison: Comparison | None, arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A line for each arm, the best first; those of which nothing counts last."""
    by_arm = {id(result.arm): result for result in comparison.by_score} if comparison else {}
    ordered = [result.arm for result in comparison.by_score] if comparison else []
    ordered += [arm for arm in arms if id(arm) not in by_arm]
    return [_known(_line(arm, by_arm.get(id(arm)))) for arm in ordered]


def _line(arm: Arm, result: ArmResult | None) -> dict[str, Any]:
    line: dict[str, Any] = {
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
        return line
    several = result.interquartile
    return line | {
        "scored_seeds": result.scores.num_seeds,
        "scores": [float(score) for score in result.scores.runs],
        "interval": _ends(result.score),
        "difference": result.difference.value,
        "difference_interval": _ends(result.difference),
        "p_value": result.p_value,
        "verdict": result.verdict or "baseline",
        "chance_better": result.chance_better,
        "visible_difference": result.visible_difference,
        "seeds_needed": result.seeds_needed,
        "interquartile_mean": [several.value, *_ends(several)] if several else None,
        "to_baselines_score": asdict(result.efficiency),
        "mean_height_of_curve": result.area,
    }


def _ends(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _known(value: Any) -> Any:
    """The value with null for what is no finite number: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_csv(comparison: Comparison) -> str:
    """A line for each run, for a notebook."""
    scores = {
        id(run): score  # two folders may hold runs of one name
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
    """The comparison for a terminal; how many runs are unfinished only where some are."""
    lines = arm_lines(comparison, arms)
    columns = COLUMNS if any(line["failed"] for line in lines) else COLUMNS[:-1]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        justify = "left" if name in ("arm", "verdict") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "arm", overflow="fold")
    for line in lines:
        style = {"better": "green", "worse": "red"}.get(line.get("verdict", ""), "")
        shown = cells(line)[: len(columns)]
        table.add_row(*shown, style=style if line["reward"] is not None else "yellow")
    return table


def as_markdown(lines: Sequence[dict[str, Any]], text: str) -> str:
    """The sentence and the table for a page, with the folders and errors below them."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(cells(line) for line in lines)]
    blocks = [text, "", *(f"| {' | '.join(row)} |" for row in rows)]
    for line in lines:
        blocks += ["", f"{line['run']}:", "", *(f"- {folder}" for folder in line["folders"])]
        blocks += [f"- unfinished: {error}" for error in line["errors"]]
    return "\n".join(blocks) + "\n"


def cells(line: dict[str, Any]) -> list[str]:
    """One arm's line of the table."""
    failed = str(line["failed"] or "")
    if line["reward"] is None:
        return [line["name"], "0", "-", "-", "-", "-", "-", failed]
    is_baseline = line["verdict"] == "baseline"
    low, high = line["difference_interval"]
    return [
        line["name"],
        str(line["scored_seeds"]),
        f"{line['reward']:.3f}",
        "" if is_baseline else f"{line['difference']:+.3f}",
        "" if low is None else f"{low:+.3f}..{high:+.3f}",
        line["verdict"],
        f"{line['minutes']:.1f}",
        failed,
    ]
