"""One run as a report needs it: how it ended, its settings, its curves, its scores by question."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lab.report.evaluations import Evaluation, Question, evaluated_versions, read_evaluation
from lab.report.statistics import Floats
from rl.runtime.failure import first_failure
from rl.runtime.folder import RunFolder
from rl.runtime.lock import FolderInUse, ensure_free
from rl.runtime.metrics import Row, read_metrics, steps_done
from rl.runtime.start_record import load_yaml, read_record, resume_command
from rl.runtime.text import key_of, strip_escapes

LAST_STEPS = 10  # the mean reward of these is the score of a run without evaluations
RUN_KEYS = {"seed", "run_name", "resume", "output_dir"}  # differ between runs of one arm
_LONGEST_TEXT = 300  # characters of an override, or of the cause of a failure


@dataclass(frozen=True, eq=False)
class Curve:
    """Scores, with the steps, seconds and tokens of the run before each of them."""

    steps: Floats
    seconds: Floats
    tokens: Floats
    scores: Floats

    @property
    def columns(self) -> tuple[Floats, ...]:
        """The values of all points, column by column."""
        return self.steps, self.seconds, self.tokens, self.scores

    def at(self, points: Any) -> "Curve":
        """Return only these points, given by index or by a mask."""
        return Curve(*(column[points] for column in self.columns))

    def smoothed(self, window: int) -> "Curve":
        """Return the running mean of the last `window` scores, of fewer at the beginning."""
        sums = np.concatenate([[0.0], self.scores.cumsum()])
        ends = np.arange(1, len(sums))
        starts = np.maximum(ends - window, 0)
        return replace(self, scores=(sums[ends] - sums[starts]) / (ends - starts))


NO_CURVE = Curve(*(np.array([], float) for _ in range(4)))


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    """One run."""

    name: str
    folder: Path | None = None
    overrides: tuple[str, ...] = ()  # without the seed and the place of the run
    config: dict[str, Any] = field(default_factory=dict)  # by dotted key, without RUN_KEYS
    seed: Any = None
    cause: str = ""  # why it did not finish; "" if it did
    num_steps: int = 0
    max_steps: int = 1
    seconds: float = 0.0
    tokens: float = 0.0
    held_out: Curve = NO_CURVE  # mean score of each evaluation
    training: Curve = NO_CURVE  # mean reward of each batch
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by version, oldest first
    commit: str = ""
    command: str = ""  # that resumes it

    @property
    def finished(self) -> bool:
        """Whether the run counts."""
        return not self.cause

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
    """Read a run, with the last `num_judged` of its evaluations.

    `folder` is None if the job of a sweep failed before it had one, and `error` says why.
    """
    meaningful = tuple(sorted(_readable(x) for x in overrides if key_of(x) not in RUN_KEYS))
    if folder is None:
        return Run(
            name=" ".join(meaningful) or "(no name)",
            overrides=meaningful,
            cause=_readable(error or "it failed before it had a folder"),
        )
    rows, settings, record = read_metrics(folder), _settings(folder), read_record(folder)
    config, num_steps = _without_run_keys(settings, folder.name), steps_done(rows)
    max_steps = config.get("max_steps")
    max_steps = max_steps if isinstance(max_steps, int) else num_steps + 1
    versions = evaluated_versions(folder)[-num_judged:]
    seconds, tokens = (_sums_before(rows, name) for name in ("time/step", "train/tokens"))
    return Run(
        name=folder.name,
        folder=folder.path,
        overrides=meaningful,
        config=config,
        seed=settings.get("seed"),
        cause=_readable(_cause(folder, rows, error, max_steps)),
        num_steps=num_steps,
        max_steps=max_steps,
        seconds=float(seconds[-1]),
        tokens=float(tokens[-1]),
        held_out=_curve(rows, "eval/reward", seconds, tokens),
        training=_curve(rows, "train/reward", seconds, tokens),
        evaluations={version: read_evaluation(folder, version) for version in versions},
        commit=str(record.get("commit") or ""),
        command=resume_command(folder) if record else "",
    )


def _readable(text: str) -> str:
    """Return the text without characters that JSON or the drawing library refuses."""
    return strip_escapes(text).encode(errors="replace").decode()[:_LONGEST_TEXT]


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


def _without_run_keys(settings: dict[str, Any], run_name: str) -> dict[str, Any]:
    """Return the settings that runs of one arm share."""
    # Match whole words: a run called grpo must not hide the loss losses.grpo.grpo.
    name = re.compile(rf"(?<![\w.]){re.escape(run_name)}(?![\w.])")
    return {
        key: value
        for key, value in settings.items()
        if key.rpartition(".")[2] not in RUN_KEYS
        and key.partition(".")[0] not in ("format", "learned")  # of config.yaml, not of the run
        and not (isinstance(value, str) and name.search(value))
    }


def _cause(folder: RunFolder, rows: Sequence[Row], error: str | None, max_steps: int) -> str:
    """Return why a run did not finish, "" if it did."""
    if not folder.path.is_dir():
        return error or f"{folder} does not exist"
    num_steps = steps_done(rows)
    progress = f"step {num_steps} of {max_steps}"
    try:
        ensure_free(folder)
    except FolderInUse:
        return f"still going: {progress}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if failure := first_failure(folder):
            return f"{failure['part']}: {failure['message']}".splitlines()[0]
    if error is not None or not rows:
        return error or "no step was done"
    return f"stopped after {progress}" if num_steps < max_steps else ""


def _sums_before(rows: Sequence[Row], name: str) -> Floats:
    """Return the sum of a metric before each line, and after the last [T + 1]."""
    values = np.array([row.get(name) for row in rows], float)  # numpy turns None into NaN
    return np.concatenate([[0.0], np.nan_to_num(values).cumsum()])


def _curve(rows: Sequence[Row], name: str, seconds: Floats, tokens: Floats) -> Curve:
    steps, scores = (np.array([row.get(key) for row in rows], float) for key in ("step", name))
    return Curve(steps, seconds[:-1], tokens[:-1], scores).at(np.isfinite(scores))
