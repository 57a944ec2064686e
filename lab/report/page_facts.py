"""The tables and texts of the page: numbers, settings, failures, caveats, commands, origins."""

import hashlib
import shlex
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite

from lab.report.arms import Arm, differing_keys
from lab.report.chart_rows import shown_path
from lab.report.comparison import ArmResult, Comparison, by_cause
from lab.report.evaluations import shortened
from lab.report.run import Run
from lab.report.statistics import LEVEL, NUM_DRAWS, Interval
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import read_record
from rl.terminal.panel import duration

_MOST_KEYS = 60  # rows of settings
_LONGEST_VALUE = 60  # characters of a setting


@dataclass(frozen=True)
class FactTable:
    """Rows of text, and the head of each column."""

    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]


def numbers(comparison: Comparison) -> FactTable:
    """Return every number of every arm, without columns that are empty for all arms."""
    heads = ("arm", "seeds", "score", "difference", "p (Holm)", "P(better)", "visible from",
             "seeds for it", "interquartile mean")  # fmt: skip
    rows = []
    for result in comparison.by_score:
        is_baseline = result is comparison.baseline
        row = [result.arm.name, str(result.scores.num_seeds), _interval(result.score)]
        row.append("baseline" if is_baseline else _interval(result.difference, "+"))
        row += [_number(result.p_value, ".3g"), _number(result.chance_better, ".0%")]
        row.append(_number(result.visible_difference, ".3f"))
        row.append("-" if result.seeds_needed is None else str(result.seeds_needed))
        row.append(_interval(result.interquartile) if result.interquartile else "-")
        rows.append(row)
    known = [at for at in range(len(heads)) if any(row[at] != "-" for row in rows)]
    return FactTable(
        tuple(heads[at] for at in known), [tuple(row[at] for at in known) for row in rows]
    )


def efficiency(comparison: Comparison) -> FactTable:
    """Return what half of each arm's runs needed to reach the baseline's final score."""
    heads = ("arm", "steps", "time", "tokens", "runs that reached it", "mean height of the curve")
    rows = []
    for result in comparison.by_score:
        taken = result.efficiency
        needed = ("fewer than half" if taken.num_reached else "never",) * 3
        if isfinite(taken.steps):
            needed = (f"{taken.steps:,.0f}", duration(taken.seconds), f"{taken.tokens:,.0f}")
        reached = f"{taken.num_reached} of {taken.num_runs}"
        rows.append((result.arm.name, *needed, reached, _number(result.area, ".3f")))
    return FactTable(heads, rows)


def settings(comparison: Comparison) -> FactTable:
    """Return the settings in which arms differ."""
    base = comparison.baseline.arm
    arms = [base, *(arm for arm in comparison.arms if arm is not base)]
    runs = [arm.runs[0] for arm in arms]
    rows = [
        (key.removesuffix("._target_"), *(_setting(key, run) for run in runs))
        for key in differing_keys(runs)[:_MOST_KEYS]
    ]
    return FactTable(("setting", *(arm.name for arm in arms)), rows)


def _setting(key: str, run: Run) -> str:
    """Return a value as text; of the path of a callable only its name."""
    text = str((run.config or {}).get(key, "-"))
    return shortened(text.rpartition(".")[2] if key.endswith("_target_") else text, _LONGEST_VALUE)


def versions(comparison: Comparison) -> FactTable:
    """Return the packages and commits that are not the same in all runs."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in comparison.runs:
        for package, version in run.versions.items():
            found[package][version].append(run.name)
        if run.commit:
            found["commit of this code"][run.commit].append(run.name)
    num_recorded = sum(bool(run.versions) for run in comparison.runs)
    rows = []
    for package, by_version in sorted(found.items()):
        missing = num_recorded - sum(map(len, by_version.values()))
        if len(by_version) > 1 or (missing > 0 and not package.startswith("commit")):
            texts = [f"{v}: {len(r)} runs ({r[0]} ...)" for v, r in by_version.items()]
            texts += [f"not installed: {missing} runs"] * (missing > 0)
            rows.append((package, "; ".join(texts)))
    return FactTable(("package", "versions"), rows)


def failures(comparison: Comparison) -> list[tuple[str, list[Run]]]:
    """Return the runs that do not count, by cause."""
    return by_cause(comparison.left_out)


def caveats(comparison: Comparison) -> list[str]:
    """Return what these numbers do not show."""
    texts = []
    envs = sorted({question.env for question in comparison.questions})
    if len(envs) == 1:
        texts.append(f"One environment ({envs[0]}): elsewhere the arms may come in another order.")
    starts = {_fingerprint(run) for run in comparison.runs} - {""}
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


def _fingerprint(run: Run) -> str:
    """Return the fingerprint of the initial model, "" if it is unknown."""
    with suppress(OSError, IndexError):
        return RunFolder(run.folder).model_fingerprint() if run.folder else ""
    return ""


def again(comparison: Comparison) -> list[tuple[str, str]]:
    """Return for each arm the command that repeats its seeds."""
    return [(arm.name, _command(arm)) for arm in comparison.arms]


def _command(arm: Arm) -> str:
    run = arm.runs[0]
    record = read_record(RunFolder(run.folder)) if run.folder else {}
    command = [str(word) for word in record.get("command") or ["python", "train.py"]]
    seeds = list(dict.fromkeys(str(one.seed) for one in arm.runs if one.seed is not None))
    # The config of a shipped sweep sweeps over its own keys, so repeat only one of its runs.
    if len(seeds) > 1 and "hydra.mode=RUN" not in command:
        return shlex.join([*command, *run.overrides, "--multirun", f"seed={','.join(seeds)}"])
    return shlex.join([*command, *run.overrides, *(f"seed={seed}" for seed in seeds[:1])])


def origins(comparison: Comparison) -> FactTable:
    """Return the seeds, commits, rollouts and folders behind each arm."""
    heads = ("arm", "seeds", "commit", "hash of the judged rollouts", "folders")
    return FactTable(heads, [_origin(result) for result in comparison.by_score])


def _origin(result: ArmResult) -> tuple[str, ...]:
    digests = [one.digest for run in result.runs for one in run.evaluations.values()]
    commits = sorted({run.commit for run in result.runs if run.commit})
    return (
        result.arm.name,
        ", ".join(str(run.seed) for run in result.runs),
        ", ".join(commit[:12] for commit in commits) or "not recorded",
        hashlib.sha256("".join(digests).encode()).hexdigest()[:12] if digests else "-",
        ", ".join(shown_path(run) for run in result.runs),
    )


def _interval(interval: Interval, sign: str = "") -> str:
    value = f"{interval.value:{sign}.3f}"
    if not isfinite(interval.low):
        return value
    return f"{value} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _number(value: float, spec: str) -> str:
    return format(value, spec) if isfinite(value) else "-"
