"""One run as a report needs it: how it ended, its settings, its curves, its scores by question."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lab.report.curve import NO_CURVE, Curve
from lab.report.evaluations import Evaluation, Question, evaluated_versions, read_evaluation
from lab.report.statistics import Floats
from rl.runtime.failure import first_failure
from rl.runtime.folder import RunFolder
from rl.runtime.lock import FolderInUse, ensure_free
from rl.runtime.metrics import Row, read_metrics, steps_done
from rl.runtime.start_record import load_yaml, read_record, resume_command
from rl.runtime.text import key_of
from rl.terminal.panel import ALARMS

FINISHED, RUNNING, FAILED = "finished", "still going", "failed"
LAST_STEPS = 10  # the mean reward of these is the score of a run without evaluations
RUN_KEYS = {"seed", "run_name", "resume", "output_dir"}  # differ between runs of one arm
HEALTH = {  # the metrics under "Health" by their names on the page
    "entropy": "train/entropy",
    "mismatch": "mismatch/mean_abs",
    "clipped": "train/clip_fraction",
    "staleness": "staleness/mean",
    "gradient norm": "train/grad_norm",
    "length": "rollout/mean_length",
    "truncated": "rollout/truncated",
    "zero spread": "rollout/zero_spread",
}
_COLUMNS = ("step", *HEALTH.values(), *ALARMS)
_LONGEST_CAUSE = 300  # characters


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """One run."""

    name: str
    folder: Path | None = None
    overrides: tuple[str, ...] = ()  # without the seed and the place of the run
    config: dict[str, Any] | None = None  # by dotted key, without the seed and the run's name
    seed: Any = None
    status: str = FINISHED
    cause: str = ""  # why it did not finish
    last_log_line: str = ""
    num_steps: int
    max_steps: int
    columns: dict[str, Floats] = field(  # metric: value of each line [T], NaN if it has none
        default_factory=lambda: dict.fromkeys(_COLUMNS, np.array([], float))
    )
    activities: dict[str, float] = field(default_factory=dict)  # mean seconds per step
    seconds: float
    tokens: float
    held_out: Curve = NO_CURVE  # mean score of each evaluation
    training: Curve = NO_CURVE  # mean reward of each batch
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by version, oldest first
    num_broken: int = 0  # lines of metrics that cannot be read
    versions: dict[str, str] = field(default_factory=dict)  # of packages
    commit: str = ""
    command: str = ""  # that resumes it

    @property
    def finished(self) -> bool:
        """Whether the run counts."""
        return self.status == FINISHED

    @property
    def training_reward(self) -> float | None:
        """The mean reward of the last steps; None for a run without rewards."""
        rewards = self.training.scores[-LAST_STEPS:]
        return float(rewards.mean()) if len(rewards) else None

    @property
    def questions(self) -> set[Question]:
        """The questions of the last evaluation."""
        return set(list(self.evaluations.values())[-1].scores) if self.evaluations else set()

    def judged_versions(self, num_judged: int) -> list[int]:
        """Return the last evaluated versions; the untrained version 0 only if it is the only."""
        trained = [version for version in self.evaluations if version > 0]
        return trained[-num_judged:] or list(self.evaluations)


def read_run(
    folder: RunFolder | None, overrides: Sequence[str], error: str | None, num_judged: int
) -> Run:
    """Read a run, with the first and the last `num_judged` of its evaluations.

    Args:
        folder: of the run; None: it failed before it had one.
        overrides: of the command line.
        error: why the job of a sweep failed; None: unknown or none.
        num_judged: evaluations at the end of the run that are averaged.

    """
    meaningful = tuple(sorted(item for item in overrides if key_of(item) not in RUN_KEYS))
    if folder is None:
        return Run(
            name=" ".join(meaningful) or "(no name)",
            overrides=meaningful,
            status=FAILED,
            cause=(error or "it failed before it had a folder")[:_LONGEST_CAUSE],
            num_steps=0,
            max_steps=1,
            seconds=0.0,
            tokens=0.0,
        )
    rows, settings, record = read_metrics(folder), _settings(folder), read_record(folder)
    config, num_steps = _without_run_keys(settings, folder.name), steps_done(rows)
    max_steps = (config or {}).get("max_steps")
    max_steps = max_steps if isinstance(max_steps, int) else num_steps + 1
    status, cause = _status(folder, rows, error, max_steps)
    seconds, tokens = (_sums_before(rows, name) for name in ("time/step", "train/tokens"))
    return Run(
        name=folder.name,
        folder=folder.path,
        overrides=meaningful,
        config=config,
        seed=settings.get("seed"),
        status=status,
        cause=cause[:_LONGEST_CAUSE],
        last_log_line="" if status == FINISHED else _last_log_line(folder),
        num_steps=num_steps,
        max_steps=max_steps,
        columns={name: _column(rows, name) for name in _COLUMNS},
        activities=_activities(rows),
        seconds=float(seconds[-1]),
        tokens=float(tokens[-1]),
        held_out=_curve(rows, "eval/reward", seconds, tokens),
        training=_curve(rows, "train/reward", seconds, tokens),
        evaluations=_evaluations(folder, num_judged),
        num_broken=_num_lines(folder) - len(rows) if status != RUNNING else 0,
        versions=_versions(folder),
        commit=str(record.get("commit") or ""),
        command=resume_command(folder) if record else "",
    )


def _settings(folder: RunFolder) -> dict[str, Any]:
    """Return all settings by dotted key; empty if config.yaml is missing or broken."""
    try:
        return _flat(load_yaml(folder.config.read_bytes()))
    except (OSError, yaml.YAMLError):
        return {}


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _without_run_keys(settings: dict[str, Any], run_name: str) -> dict[str, Any] | None:
    """Return the settings that runs of one arm share; None if there are none."""
    # Match whole words: a run called grpo must not hide the loss losses.grpo.grpo.
    name = re.compile(rf"(?<![\w.]){re.escape(run_name)}(?![\w.])")
    kept = {
        key: value
        for key, value in settings.items()
        if key.rpartition(".")[2] not in RUN_KEYS
        and key.partition(".")[0] not in ("format", "learned")  # of config.yaml, not of the run
        and not (isinstance(value, str) and name.search(value))
    }
    return kept if settings else None


def _status(
    folder: RunFolder, rows: Sequence[Row], error: str | None, max_steps: int
) -> tuple[str, str]:
    """Return how a run ended, and why it did not finish."""
    if not folder.path.is_dir():
        return FAILED, error or f"{folder} does not exist"
    num_steps = steps_done(rows)
    progress = f"step {num_steps} of {max_steps}"
    try:
        ensure_free(folder)
    except FolderInUse:
        return RUNNING, f"still going: {progress}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if failure := first_failure(folder):
            return FAILED, f"{failure['part']}: {failure['message']}".splitlines()[0]
    if error is not None or not rows:
        return FAILED, error or "no step was done"
    if num_steps < max_steps:
        return FAILED, f"stopped after {progress}"
    return FINISHED, ""


def _sums_before(rows: Sequence[Row], name: str) -> Floats:
    """Return the sum of a metric before each line, and after the last [T + 1]."""
    return np.concatenate([[0.0], np.nan_to_num(_column(rows, name)).cumsum()])


def _curve(rows: Sequence[Row], name: str, seconds: Floats, tokens: Floats) -> Curve:
    at = [index for index, row in enumerate(rows) if row.get(name) is not None]
    steps = np.array([rows[index]["step"] for index in at], float)
    scores = np.array([rows[index][name] for index in at], float)
    return Curve(steps, seconds[at], tokens[at], scores)


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([row.get(name) for row in rows], float)  # numpy turns None into NaN


def _activities(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean seconds per step of each activity, and `other` for the rest of the step."""
    trained = [row for row in rows if row.get("time/step") is not None]
    names = {name for row in (*trained[:3], *trained[-3:]) for name in row}
    means = {
        name.removeprefix("time/"): float(np.nan_to_num(_column(trained, name)).mean())
        for name in sorted(names)
        if name.startswith("time/")
    }
    total = means.pop("step", 0.0)
    return means | {"other": max(0.0, total - sum(means.values()))} if means else {}


def _evaluations(folder: RunFolder, num_judged: int) -> dict[int, Evaluation]:
    versions = evaluated_versions(folder)
    wanted = sorted({*versions[:1], *versions[-num_judged:]})
    return {version: read_evaluation(folder, version) for version in wanted}


def _num_lines(folder: RunFolder) -> int:
    """Return the number of complete lines of the metrics."""
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
    """Return the last log line of the process that failed, else of the trainer."""
    failed = [path.stem for path in sorted(folder.failures.glob("*.json"))]
    for process in (*failed, "trainer.rank0", "rollouts", "inference"):
        with suppress(OSError):
            end = folder.log_of(process).read_bytes()[-4000:].decode(errors="replace")
            if lines := [line.strip() for line in end.split("\n") if line.strip()]:
                return f"{process}: {lines[-1]}"[:_LONGEST_CAUSE]
    return ""
