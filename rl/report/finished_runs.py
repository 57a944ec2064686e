"""Finished runs, read back from their folders: settings, overrides, metrics, and how to go on."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from rl.run.folder import RunFolder
from rl.run.metrics import Row, read_metrics
from rl.run.status import STOPPED, progress_of, read_statuses
from rl.run.typed import key_of

_WORDS = {"true", "false", "null", "nan", "inf"}  # that Hydra takes for something else
_YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # some ten times as fast where it is built
RUN_KEYS = {"seed", "run_name", "resume", "output_dir"}  # differ between runs of one experiment


@dataclass(frozen=True)
class RunResult:
    """One run, as far as it got."""

    overrides: tuple[str, ...]  # those that matter: without the seed and where the run lies
    folder: RunFolder | None  # None: it failed before it had one
    error: str | None = None  # what the sweep knows of its failure

    @cached_property
    def rows(self) -> list[Row]:
        """The run's metrics."""
        return read_metrics(self.folder) if self.folder else []

    @property
    def num_steps(self) -> int:
        """Optimizer steps done."""
        return steps_done(self.rows)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All of the run's settings by dotted key; none where it left none that can be read."""
        if self.folder is None or not self.folder.config.exists():
            return {}
        try:
            return flatten(yaml.load(self.folder.config.read_bytes(), Loader=_YAML))
        except (OSError, yaml.YAMLError):
            return {}

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The run's settings without the seed and what holds its name; None without any."""
        if self.folder is None or not self.settings:
            return None
        # A word of its own: a run called grpo must not hide the loss losses.grpo.grpo.
        name = re.compile(rf"(?<![\w.]){re.escape(self.folder.name)}(?![\w.])")
        return {
            key: value
            for key, value in self.settings.items()
            if key.rpartition(".")[2] not in RUN_KEYS
            and not (isinstance(value, str) and name.search(value))
        }

    @property
    def failed(self) -> bool:
        """True when it ended before its last step, unless nothing was left to learn."""
        if self.error is not None or not self.rows:
            return True
        return self.num_steps < self.max_steps and not self._ended_well

    @property
    def _ended_well(self) -> bool:
        """Whether the trainer ended it early with a good reason of its own."""
        trainer = read_statuses(self.folder).get("trainer.rank0") if self.folder else None
        if trainer is None or trainer.phase != "done":
            return False
        return progress_of(trainer.doing) not in ("", STOPPED)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run; one more than there are where nobody knows."""
        max_steps = (self.config or {}).get("max_steps")
        return max_steps if isinstance(max_steps, int) else self.num_steps + 1


def steps_done(rows: Sequence[Row]) -> int:
    """Optimizer steps behind these lines; one of an evaluation alone stands after the last step."""
    if not rows:
        return 0
    alone = all(name in ("step", "time") or name.startswith("eval/") for name in rows[-1])
    return rows[-1]["step"] + (0 if alone and len(rows[-1]) > 2 else 1)


def result_of(folder: RunFolder, error: str | None = None) -> RunResult:
    """The run that lies in a folder."""
    return RunResult(meaningful(read_overrides(folder)), folder, error)


def resume_command(folder: RunFolder) -> str:
    """The command line that takes the run up where its last checkpoint left it, as it is typed."""
    record = read_record(folder)
    kept = [item for item in read_overrides(folder) if key_of(item) not in {"run_name", "resume"}]
    name = _quoted(str(record.get("run_name", folder.name)))
    command = record.get("command", ["python", "train.py"])
    line = shlex.join([*command, *kept, f"run_name={name}", "resume=true"])
    place = record.get("started_in", os.getcwd())
    return line if place == os.getcwd() else f"cd {shlex.quote(place)} && {line}"


def _quoted(text: str) -> str:
    """The text as Hydra's command line takes it for a text."""
    is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*( [\w./-]+)*", text, re.ASCII) is not None
    if is_plain and text.lower() not in _WORDS:
        return text
    # To Hydra a backslash is itself unless a quote follows: only those before one are doubled.
    escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def how_to_go_on(folder: RunFolder) -> str:
    """What of an unfinished run is saved and what is lost, and the command that takes it up."""
    num_steps = steps_done(read_metrics(folder))
    if not num_steps:
        return "no step was done: nothing is lost, and the name is free"
    saved = folder.num_saved_steps()
    if not saved:
        lost = (
            f"its {num_steps} steps are in no checkpoint (trainer.checkpoint_every): they are lost"
        )
    elif saved < num_steps:
        lost = (
            f"{saved} of its {num_steps} steps are in the last checkpoint; "
            f"{num_steps - saved} are lost"
        )
    else:
        lost = f"all of its {saved} steps are in the last checkpoint"
    return f"{lost}\ngo on  {resume_command(folder)}"


def read_overrides(folder: RunFolder) -> list[str]:
    """The run's command-line overrides as `key=value`; none when there is no such file."""
    return [str(item) for item in read_record(folder).get("overrides") or []]


def read_record(folder: RunFolder) -> dict[str, Any]:
    """What was noted of how the run was started."""
    try:
        content = yaml.load(folder.overrides.read_bytes(), Loader=_YAML)
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {"overrides": content}


def meaningful(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides that say what was run, not where or with which seed, in alphabetical order."""
    return tuple(sorted(item for item in overrides if key_of(item) not in RUN_KEYS))


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    if not isinstance(node, Mapping):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
