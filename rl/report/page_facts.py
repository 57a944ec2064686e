"""What the page says in words and tables: numbers, differences, failures, how to do it again."""

import hashlib
import shlex
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rl.report.arms import Arm, differing_keys
from rl.report.chart_data import shown_path
from rl.report.comparison import ArmResult, Comparison, by_cause
from rl.report.finished_runs import read_record
from rl.report.panel import duration
from rl.report.statistics import LEVEL, NUM_DRAWS, Interval
from rl.run.folder import RunFolder

_MOST_KEYS = 60  # rows of what differs
_LONGEST_VALUE = 60  # characters of a setting


@dataclass(frozen=True)
class FactTable:
    """Rows of text under their heads."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def numbers(comparison: Comparison) -> FactTable:
    """Every number of every arm, for whoever wants to check one; none that no arm has."""
    heads = ["arm", "seeds", "score", "difference", "p (Holm)", "P(better)", "visible from"]
    heads += ["seeds for it"]
    several = any(result.interquartile for result in comparison.results)
    heads += ["interquartile mean"] * several
    rows = []
    for result in comparison.by_score:
        is_baseline = result is comparison.baseline
        needed = "-" if result.seeds_needed is None else str(result.seeds_needed)
        row = [
            *(result.arm.name, str(result.scores.num_seeds), _interval(result.score)),
            "baseline" if is_baseline else _interval(result.difference, "+"),
            _number(result.p_value, ".3g"),
            _number(result.chance_better, ".0%"),
            _number(result.visible_difference, ".3f"),
            needed,
        ]
        if several and result.interquartile:
            row.append(_interval(result.interquartile))
        rows.append(tuple(row))
    known = [place for place in range(len(heads)) if any(row[place] != "-" for row in rows)]
    return FactTable(
        tuple(heads[place] for place in known),
        tuple(tuple(row[place] for place in known) for row in rows),
    )


def efficiency(comparison: Comparison) -> FactTable:
    """What half of each arm's runs took to reach the baseline's final score."""
    heads = ("arm", "steps", "time", "tokens", "runs that reached it", "mean height of the curve")
    rows = []
    for result in comparison.by_score:
        taken = result.efficiency
        known = isfinite(taken.steps)
        otherwise = "fewer than half" if taken.num_reached else "never"
        rows.append(
            (
                result.arm.name,
                f"{taken.steps:,.0f}" if known else otherwise,
                duration(taken.seconds) if known else otherwise,
                f"{taken.tokens:,.0f}" if known else otherwise,
                f"{taken.num_reached} of {taken.num_runs}",
                _number(result.area, ".3f"),
            )
        )
    return FactTable(heads, tuple(rows))


def settings(comparison: Comparison) -> FactTable:
    """Only the settings in which arms differ."""
    base = comparison.baseline.arm
    arms = [base, *(arm for arm in comparison.arms if arm is not base)]
    runs = [arm.runs[0] for arm in arms]
    rows = [
        (key.removesuffix("._target_"), *(_setting(key, run.config or {}) for run in runs))
        for key in differing_keys(runs)[:_MOST_KEYS]
    ]
    return FactTable(("setting", *(arm.name for arm in arms)), tuple(rows))


def versions(comparison: Comparison) -> FactTable:
    """Packages and commits that are not the same in all runs: they should be."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in comparison.runs:
        for package, version in run.versions.items():
            found[package][version].append(run.name)
        if run.commit:
            found["commit of this code"][run.commit].append(run.name)
    counted = [run for run in comparison.runs if run.versions]
    rows = []
    for package, by_version in sorted(found.items()):
        missing = len(counted) - sum(map(len, by_version.values()))
        if len(by_version) > 1 or (missing > 0 and not package.startswith("commit")):
            texts = [f"{v}: {len(r)} runs ({r[0]} ...)" for v, r in by_version.items()]
            texts += [f"not installed: {missing} runs"] * (missing > 0)
            rows.append((package, "; ".join(texts)))
    return FactTable(("package", "versions"), tuple(rows))


def failures(comparison: Comparison) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Runs that do not count by cause: name, last log line, and the command that goes on."""
    return [
        (why, [(run.name, run.last_log_line, run.command) for run in runs])
        for why, runs in by_cause(comparison.left_out)
    ]


def caveats(comparison: Comparison) -> list[str]:
    """What these numbers cannot say."""
    texts = []
    envs = sorted({question.env for question in comparison.questions})
    if len(envs) == 1:
        texts.append(f"One environment ({envs[0]}): elsewhere the arms may come in another order.")
    starts = {_start(run.folder) for run in comparison.runs if run.folder} - {""}
    if len(starts) == 1:
        texts.append("All runs start from the same model: another may give other differences.")
    elif starts:
        texts.append(f"The runs start from {len(starts)} different models, which differences show.")
    steps = {run.max_steps for result in comparison.results for run in result.runs}
    if len(steps) == 1:
        texts.append(f"Scores are those after {steps.pop()} steps: longer runs may cross.")
    else:
        texts.append(f"The runs are not equally long ({min(steps)} to {max(steps)} steps).")
    if len(comparison.others) > 1 and comparison.has_intervals:
        texts.append(
            f"{len(comparison.others)} arms were compared with one: p-values are adjusted for that "
            "(Holm), the intervals of the differences are not."
        )
    if comparison.has_intervals:
        texts.append(
            f"Intervals: {LEVEL:.0%}, {NUM_DRAWS:,} draws of seeds within arms and of questions "
            "for all arms (docs/report.md)."
        )
    return texts


def _start(folder: Any) -> str:
    with suppress(OSError, IndexError):
        return RunFolder(folder).model_fingerprint()
    return ""


def again(comparison: Comparison) -> list[tuple[str, str]]:
    """For each arm the command that runs its seeds again."""
    return [(arm.name, _command(arm)) for arm in comparison.arms]


def _command(arm: Arm) -> str:
    run = arm.runs[0]
    record = read_record(RunFolder(run.folder)) if run.folder else {}
    command = [str(part) for part in record.get("command") or ["python", "train.py"]]
    seeds = list(dict.fromkeys(str(one.seed) for one in arm.runs if one.seed is not None))
    # A prepared sweep would sweep over its own keys again: of such an arm one run is shown.
    if len(seeds) > 1 and "hydra.mode=RUN" not in command:
        return shlex.join([*command, *run.overrides, "--multirun", f"seed={','.join(seeds)}"])
    return shlex.join([*command, *run.overrides, *(f"seed={seed}" for seed in seeds[:1])])


def origins(comparison: Comparison) -> FactTable:
    """Where each arm's numbers come from: seeds, commit, hash of the judged rollouts, folders."""
    rows = [_origin(result) for result in comparison.by_score]
    return FactTable(
        ("arm", "seeds", "commit", "hash of the judged rollouts", "folders"), tuple(rows)
    )


def _origin(result: ArmResult) -> tuple[str, ...]:
    content = hashlib.sha256()
    for run in result.runs:
        for evaluation in run.evaluations.values():
            content.update(evaluation.digest.encode())
    commits = sorted({run.commit for run in result.runs if run.commit})
    has_any = any(run.evaluations for run in result.runs)
    return (
        result.arm.name,
        ", ".join(str(run.seed) for run in result.runs),
        ", ".join(commit[:12] for commit in commits) or "not recorded",
        content.hexdigest()[:12] if has_any else "-",
        ", ".join(shown_path(run) for run in result.runs),
    )


def _setting(key: str, config: dict[str, Any]) -> str:
    """The value as it is read best: of a dotted path to a callable its name."""
    text = str(config.get(key, "-"))
    if key.endswith("_target_"):
        text = text.rpartition(".")[2]
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _interval(interval: Interval, sign: str = "") -> str:
    value = f"{interval.value:{sign}.3f}"
    if not isfinite(interval.low):
        return value
    return f"{value} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _number(value: float, spec: str) -> str:
    return format(value, spec) if isfinite(value) else "-"
