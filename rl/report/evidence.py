"""One run as a comparison needs it: how it ended, its curves, and its scores by question."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl.report.curve import Curve
from rl.report.evaluations import Evaluation, evaluated_versions, read_evaluation
from rl.report.finished_runs import RunResult, read_record, resume_command
from rl.report.panel import ALARMS
from rl.report.statistics import Floats
from rl.run.failure import first_failure
from rl.run.folder import RunFolder
from rl.run.lock import FolderInUse, ensure_free
from rl.run.metrics import Row

FINISHED, RUNNING, FAILED = "finished", "still going", "failed"
LAST_STEPS = 10  # whose mean reward a run without evaluations is judged by
HEALTH = {  # metrics that say whether training is well, by their names on the page
    "entropy": "train/entropy",
    "mismatch": "mismatch/mean_abs",
    "clipped": "train/clip_fraction",
    "staleness": "staleness/mean",
    "gradient norm": "train/grad_norm",
    "length": "rollout/mean_length",
    "truncated": "rollout/truncated",
    "zero spread": "rollout/zero_spread",
}
KEPT = ("step", *HEALTH.values(), *ALARMS)
_LONGEST_CAUSE = 300  # characters


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence:
    """One run."""

    name: str
    folder: Path | None
    overrides: tuple[str, ...]  # those that matter
    config: dict[str, Any] | None  # without seed and names
    seed: Any
    status: str
    cause: str  # why it did not finish
    last_log_line: str
    num_steps: int
    max_steps: int
    columns: dict[str, Floats]  # metric: value at each line [T], NaN where it has none
    activities: dict[str, float]  # mean seconds per step
    seconds: float
    tokens: float
    held_out: Curve  # empty without evaluations
    training: Curve  # reward of the batches
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by version, oldest first
    num_broken: int = 0  # lines of the metrics that are none
    versions: dict[str, str] = field(default_factory=dict)  # of packages
    commit: str = ""
    command: str = ""  # that goes on with it

    @property
    def finished(self) -> bool:
        """Whether it counts."""
        return self.status == FINISHED

    @property
    def training_reward(self) -> float | None:
        """Mean reward of the last steps; None for a run that has none."""
        rewards = self.training.scores[-LAST_STEPS:]
        return float(rewards.mean()) if len(rewards) else None


def evidence_of(run: RunResult, num_judged: int = 1) -> Evidence:
    """Read a run; of its evaluations the first and the last `num_judged`."""
    folder, rows = run.folder, run.rows
    status, cause = _status(run)
    record = read_record(folder) if folder else {}
    seconds, tokens = _running_sums(rows)
    return Evidence(
        name=folder.name if folder else " ".join(run.overrides) or "(no name)",
        folder=folder.path if folder else None,
        overrides=run.overrides,
        config=run.config,
        seed=run.settings.get("seed"),
        status=status,
        cause=cause[:_LONGEST_CAUSE],
        last_log_line="" if status == FINISHED or not folder else _last_log_line(folder),
        num_steps=run.num_steps,
        max_steps=run.max_steps,
        columns={name: _column(rows, name) for name in KEPT},
        activities=_activities(rows),
        seconds=float(seconds[-1]),
        tokens=float(tokens[-1]),
        held_out=_curve(rows, "eval/reward", seconds, tokens),
        training=_curve(rows, "train/reward", seconds, tokens),
        evaluations=_evaluations(folder, num_judged) if folder else {},
        num_broken=_num_lines(folder) - len(rows) if folder and status != RUNNING else 0,
        versions=_versions(folder) if folder else {},
        commit=str(record.get("commit") or ""),
        command=resume_command(folder) if folder and record else "",
    )


def _status(run: RunResult) -> tuple[str, str]:
    """How a run ended, and why if it did not end well."""
    folder = run.folder
    if folder is None:
        return FAILED, run.error or "it failed before it had a folder"
    if not folder.path.is_dir():
        return FAILED, run.error or f"{folder} does not exist"
    progress = f"step {run.num_steps} of {run.max_steps}"
    try:
        ensure_free(folder)
    except FolderInUse:
        return RUNNING, f"still going: {progress}"
    failure = None
    with suppress(OSError, ValueError, KeyError, TypeError):
        failure = first_failure(folder)
    if failure:
        return FAILED, f"{failure['part']}: {failure['message']}".splitlines()[0]
    if run.error:
        return FAILED, run.error
    if not run.rows:
        return FAILED, "no step was done"
    return (FAILED, f"stopped after {progress}") if run.failed else (FINISHED, "")


def _running_sums(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Seconds and tokens before each line, and after the last [T + 1]."""
    seconds, tokens = (
        np.concatenate([[0.0], np.nan_to_num(_column(rows, name)).cumsum()])
        for name in ("time/step", "train/tokens")
    )
    return seconds, tokens


def _curve(rows: Sequence[Row], name: str, seconds: Floats, tokens: Floats) -> Curve:
    at = [index for index, row in enumerate(rows) if row.get(name) is not None]
    steps = np.array([rows[index]["step"] for index in at], float)
    scores = np.array([rows[index][name] for index in at], float)
    return Curve(steps, seconds[at], tokens[at], scores)


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([row.get(name) for row in rows], float)  # of None numpy makes NaN


def _activities(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds per step by activity, and `other` for what no activity has."""
    trained = [row for row in rows if row.get("time/step") is not None]
    names = {name for row in (*trained[:3], *trained[-3:]) for name in row}
    parts = {
        name.removeprefix("time/"): float(np.nan_to_num(_column(trained, name)).mean())
        for name in sorted(names)
        if name.startswith("time/")
    }
    total = parts.pop("step", 0.0)
    return parts | {"other": max(0.0, total - sum(parts.values()))} if parts else {}


def _evaluations(folder: RunFolder, num_judged: int) -> dict[int, Evaluation]:
    versions = evaluated_versions(folder)
    wanted = sorted({*versions[:1], *versions[-num_judged:]})
    return {version: read_evaluation(folder, version) for version in wanted}


def _num_lines(folder: RunFolder) -> int:
    """Complete lines of the metrics: those of a run that is going may end in half of one."""
    try:
        return folder.metrics.read_bytes().count(b"\n")
    except OSError:
        return 0


def _versions(folder: RunFolder) -> dict[str, str]:
    with suppress(OSError, ValueError):
        content = json.loads(folder.versions.read_text())
        if isinstance(content, dict):
            return {str(name): str(version) for name, version in content.items()}
    return {}


def _last_log_line(folder: RunFolder) -> str:
    """The last words of the process that failed, else of the trainer."""
    failed = [path.stem for path in sorted(folder.failures.glob("*.json"))]
    for part in (*failed, "trainer.rank0", "rollouts", "inference"):
        with suppress(OSError):
            lines = folder.log_of(part).read_bytes()[-4000:].decode(errors="replace").split("\n")
            if spoken := [line.strip() for line in lines if line.strip()]:
                return f"{part}: {spoken[-1]}"[:_LONGEST_CAUSE]
    return ""


def is_same_arm(one: Evidence, other: Evidence) -> bool:
    """True when two runs differ in nothing but the seed, as far as it is known.

    Settings that only one commit of this code knows were nobody's choice.
    """
    if one.config is None or other.config is None:
        return one.overrides == other.overrides
    if one.commit == other.commit or one.overrides != other.overrides:
        return one.config == other.config
    shared = one.config.keys() & other.config.keys()
    either = one.config.keys() | other.config.keys()
    # A key that has become a group, `critic` and then `critic.lam`, is another choice.
    groups = {key[:end] for key in either for end in range(len(key)) if key[end] == "."}
    return not groups & either and all(one.config[key] == other.config[key] for key in shared)
