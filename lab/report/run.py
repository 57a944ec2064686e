"""Read one run for a report: how it ended, its settings, curves, and scores by question."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.report.evaluations import Evaluation, Question, evaluated_versions, read_evaluation
from lab.report.statistics import Floats
from rl.runtime.code_copies import code_versions
from rl.runtime.failure import first_failure
from rl.runtime.folder import RunFolder
from rl.runtime.lock import FolderInUse, ensure_free
from rl.runtime.metrics import LAST_STEPS, Row, mean_of, read_metrics, steps_done, training_reward
from rl.runtime.start_record import read_record, resume_command
from rl.runtime.stop_when import is_fulfilled
from rl.runtime.sweep_folder import NOT_STARTED
from rl.runtime.text import START_KEYS, key_of, leaves, printable

RUN_KEYS = START_KEYS | {"seed", "output_dir"}  # keys that may differ between runs of an arm
COPIED_SEED = "${seed}"  # in Run.config, the value of a nested seed that equals the run's seed
_STILL_GOING = "still going"
_LONGEST_TEXT = 300  # longer names, overrides and causes of failure are cut to this length


@dataclass(frozen=True, eq=False)
class Curve:
    """A learning curve: scores, and the steps, seconds and tokens of training before each score."""

    steps: Floats
    seconds: Floats
    tokens: Floats
    scores: Floats

    @property
    def columns(self) -> tuple[Floats, ...]:
        return self.steps, self.seconds, self.tokens, self.scores

    def smoothed(self, window: int) -> "Curve":
        """Return the curve with each score averaged with up to `window` - 1 scores before it."""
        sums = np.concatenate([[0.0], self.scores.cumsum()])
        ends = np.arange(1, len(sums))
        starts = np.maximum(ends - window, 0)
        return replace(self, scores=(sums[ends] - sums[starts]) / (ends - starts))


NO_CURVE = Curve(*(np.array([], float) for _ in range(4)))


@dataclass(frozen=True, eq=False, kw_only=True)
class Run:
    name: str
    folder: Path | None = None
    overrides: tuple[str, ...] = ()  # overrides whose keys are not in RUN_KEYS
    config: dict[str, Any] = field(default_factory=dict)  # settings by dotted key, without RUN_KEYS
    seed: Any = None
    cause: str = ""  # why the run did not finish, "" if it finished
    has_begun: bool = True  # False for a job that has not started or has failed without a folder
    num_steps: int = 0
    max_steps: int = 1
    seconds: float = 0.0
    tokens: float = 0.0
    held_out: Curve = NO_CURVE  # mean score of each evaluation
    training: Curve = NO_CURVE  # mean reward of each batch
    # Policy version -> evaluation, oldest first. Contains only the last `num_judged` evaluations.
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    commit: str = ""
    started_from: str = ""  # run and step of the initial weights, "" if no run trained them
    # File of user code -> hashes of the file's versions in this run, oldest first.
    code: dict[str, tuple[str, ...]] = field(default_factory=dict)
    command: str = ""  # the command that resumes the run
    grown: int = 0  # index of the sweep's command that added this run, 0 for the first command
    unscored_share: float = 0.0  # share of unscored rollouts in the last LAST_STEPS steps
    selects_examples: bool = False  # whether rewards chose examples or rollouts

    @property
    def finished(self) -> bool:
        return not self.cause

    @property
    def is_open(self) -> bool:
        return self.cause == NOT_STARTED or self.cause.startswith(_STILL_GOING)

    @property
    def ended_early(self) -> bool:
        return self.has_begun and not self.finished and not self.is_open

    @property
    def training_reward(self) -> float | None:
        return training_reward(self.training.scores.tolist())

    @property
    def questions(self) -> set[Question]:
        return set(list(self.evaluations.values())[-1].scores) if self.evaluations else set()

    def judged_evaluations(self, num_judged: int) -> list[Evaluation]:
        return [self.evaluations[version] for version in self.judged_versions(num_judged)]

    def judged_versions(self, num_judged: int) -> list[int]:
        """Return the last `num_judged` evaluated versions, without version 0 if others exist."""
        trained = [version for version in self.evaluations if version > 0]
        return trained[-num_judged:] or list(self.evaluations)


def read_run(
    folder: RunFolder | None, overrides: Sequence[str], error: str | None, num_judged: int
) -> Run:
    """Return a run with its last `num_judged` evaluations. See FoundRun for other arguments."""
    meaningful = tuple(sorted(_make_readable(x) for x in overrides if key_of(x) not in RUN_KEYS))
    seeds = [_make_readable(x.partition("=")[2]) for x in overrides if key_of(x) == "seed"]
    seed = seeds[-1] if seeds else None
    if folder is None:
        return Run(
            name=" ".join([*meaningful, *(f"seed={x}" for x in seeds[-1:])]) or "(no name)",
            overrides=meaningful,
            seed=seed,
            has_begun=False,
            cause=_make_readable(error or "it failed before its folder was created"),
        )
    rows, record, saved = read_metrics(folder), read_record(folder), folder.read_yaml(folder.config)
    settings = dict(leaves(saved, of_lists=False)) if saved else {}
    config, num_steps = _without_run_keys(settings, folder.name, overrides), steps_done(rows)
    max_steps = config.get("max_steps")
    max_steps = max_steps if isinstance(max_steps, int) else num_steps + 1
    versions = evaluated_versions(folder)
    seconds, tokens = (_sums_before(rows, name) for name in ("time/step", "train/tokens"))
    return Run(
        name=_make_readable(folder.name),
        folder=folder.path,
        overrides=meaningful,
        config=config,
        seed=settings.get("seed", seed),
        # If the folder is missing and there is no error, the folder was deleted after the run.
        has_begun=folder.path.is_dir() or error is None,
        cause=_make_readable(_end_cause(folder, rows, error, max_steps, settings, versions)),
        num_steps=num_steps,
        max_steps=max_steps,
        seconds=float(seconds[-1]),
        tokens=float(tokens[-1]),
        held_out=_curve(rows, "eval/reward", seconds, tokens),
        training=_curve(rows, "train/reward", seconds, tokens),
        evaluations={v: read_evaluation(folder, v) for v in versions[-num_judged:]},
        commit=_make_readable(record.get("commit", "")),
        started_from=_make_readable(folder.started_from),
        code=code_versions(folder),
        command=printable(resume_command(folder)) if record else "",
        unscored_share=mean_of(rows[-LAST_STEPS:], "rollout/errors") or 0.0,
        selects_examples=bool(settings.get("learned.selects_examples")),
    )


def _make_readable(text: str) -> str:
    """Return the text, cut if it is long, without characters that JSON or Vega rejects."""
    return printable(text)[:_LONGEST_TEXT]


def _without_run_keys(
    settings: dict[str, Any], run_name: str, overrides: Sequence[str]
) -> dict[str, Any]:
    # Values that contain the run's name, such as paths, differ between the runs of an arm. Remove
    # them, but match whole words, so that a run named grpo keeps the value losses.grpo.grpo. Keep a
    # value that equals the name, because the run may be named after it, but not after its seed. If
    # an override contains the name (`run_name=gsm8k env=gsm8k`), keep what this override may set.
    name = re.compile(rf"(?<![\w.]){re.escape(run_name)}(?![\w.])")
    texts = {k for k, v in settings.items() if isinstance(v, str) and name.search(v)}
    named = tuple({key_of(item) for item in overrides if name.search(item)} - RUN_KEYS)
    overridden, unnumbered = set(map(key_of, overrides)), run_name.rstrip("0123456789")
    seeds = {key for key in settings if key.endswith(".seed")} - overridden
    return {
        key: COPIED_SEED if key in seeds and value == settings.get("seed") else value
        for key, value in settings.items()
        if key not in RUN_KEYS
        and (key.rpartition(".")[2] not in RUN_KEYS or key in overridden | seeds)
        and key.partition(".")[0] not in ("format", "learned")  # users do not set these keys
        and (key not in texts or key.startswith(named) or value in (named and run_name, unnumbered))
    }


def _end_cause(
    folder: RunFolder,
    rows: Sequence[Row],
    error: str | None,
    max_steps: int,
    settings: Mapping[str, Any],
    versions: Sequence[int],
) -> str:
    if not folder.path.is_dir():
        return error or f"{folder} does not exist"
    num_steps = steps_done(rows)
    progress = f"step {num_steps} of {max_steps}"
    try:
        ensure_free(folder)
    except FolderInUse:
        return f"{_STILL_GOING}: {progress}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if failure := first_failure(folder):
            return f"{failure['part']}: {failure['message']}".splitlines()[0]
    # A run evaluates its last version after its last step, unless it never evaluates.
    evaluates = not str(settings.get("evaluation._target_")).endswith("NoEvaluation")
    last_version = max(versions, default=max_steps) if evaluates else max_steps
    is_cut_short = min(num_steps, last_version) < max_steps
    if rows and (not is_cut_short or is_fulfilled(settings.get("stop_when"), rows)):
        return ""  # even if a sweep's job failed, because its run may be resumed outside the sweep
    unevaluated = ", before its evaluation" * (num_steps >= max_steps)
    return error or (f"stopped after {progress}{unevaluated}" if rows else "no step was done")


def _sums_before(rows: Sequence[Row], name: str) -> Floats:
    """Return the sum of a metric before each of the T rows, and after the last row [T + 1]."""
    values = np.array([row.get(name) for row in rows], float)  # numpy turns None into NaN
    return np.concatenate([[0.0], np.nan_to_num(values).cumsum()])


def _curve(rows: Sequence[Row], name: str, seconds: Floats, tokens: Floats) -> Curve:
    steps, scores = (np.array([row.get(key) for row in rows], float) for key in ("step", name))
    columns, known = (steps, seconds[:-1], tokens[:-1], scores), np.isfinite(scores)
    return Curve(*(column[known] for column in columns))
