"""The run folder: the paths of its files, and functions that find, read and delete them."""

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl.runtime.files import Inside, remove, write_atomically
from rl.runtime.given_files import load_json, load_yaml, regular_file
from rl.runtime.private_folder import PrivateFolder
from rl.runtime.text import OUT_OF_MEMORY

_NUMBERED = re.compile(r"\.?(?:step|version)_([0-9]+)")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resumed run starts from."""

    step: int  # the next training step, which equals the saved policy's version
    folder: Path
    rollouts: dict[str, Any]  # saved state of the rollouts process


@dataclass(frozen=True)
class RunFolder:
    path: Path

    lock = Inside("lock")  # the process that uses the folder locks this file and writes its PID
    config = Inside("config.yaml")  # the resolved configuration
    overrides = Inside("overrides.yaml")  # the user's command, its overrides and the commit
    versions = Inside("versions.json")  # the version of every installed package
    code = Inside("code")  # copies of the user's source files (code_copies.py)
    metrics = Inside("metrics.jsonl")  # one line of metrics per step
    dropped_metrics = Inside("metrics.dropped.jsonl")  # old metrics of steps that a resume repeats
    rollouts = Inside("rollouts")  # used and rejected rollouts, one file per training step
    dropped_rollouts = Inside("rollouts.dropped")  # old rollouts of steps that a resume repeats
    tokens = Inside("tokens")  # recorded values per token (token_files.py)
    evaluations = Inside("evaluations")  # rollouts of every evaluation, one file per policy version
    evaluated = Inside("rollouts.jsonl")  # rollouts of evaluate.py or optimize_prompt.py
    checkpoints = Inside("checkpoints")  # one folder per complete checkpoint
    built_model = Inside("model")  # the initial model, if the run creates the model
    warm_start = Inside("warm-start")  # run folder of the warm start, deleted after the warm start
    logs = Inside("logs")  # one log file per process
    profile = Inside("profile")  # the profiler's trace and table of operations, two files per rank
    statuses = Inside("status")  # the current activity of each process, one file per process
    warnings = Inside("warnings")  # the warnings of each process, one file per process
    failures = Inside("failures")  # the error that ended a process, one file per process
    endpoints = Inside("endpoints")  # the address of each server, one file per process
    stop_request = Inside("stop")  # if this file exists, the run saves a checkpoint and ends
    wandb_id = Inside("wandb_id.txt")  # the id of the run at Weights & Biases
    tensorboard = Inside("tensorboard")  # the event files of TensorBoard
    _model = Inside("model.txt")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_run(self) -> bool:
        kept = (self.config, self.metrics, self.rollouts, self.evaluations)
        return any(path.exists() for path in (*kept, self.evaluated))

    def read(self, path: Path) -> bytes:
        """Return the content of a regular file in this folder. Raise OSError for other paths."""
        return regular_file(path, self.path).read_bytes()

    def read_yaml(self, path: Path) -> dict[str, Any]:
        """Return the mapping in a file of this folder, or {} if the file is missing or damaged."""
        with suppress(OSError, yaml.YAMLError):
            content = load_yaml(self.read(path))
            return content if isinstance(content, dict) else {}
        return {}

    @property
    def private(self) -> PrivateFolder:
        return PrivateFolder(self.path / "sockets")

    def log_of(self, process: str) -> Path:
        """Return the log of one process: inference, rollouts, trainer.rank0, ..."""
        return self.logs / f"{process}.log"

    def endpoint_of(self, process: str) -> Path:
        return self.endpoints / f"{process}.json"

    def restart_request_of(self, process: str) -> Path:
        return self.endpoints / f"{process}.restart"

    def rollouts_of(self, step: int) -> Path:
        return _create_parent(self.rollouts / f"step_{step:06d}.jsonl")

    def evaluation_of(self, version: int) -> Path:
        return _create_parent(self.evaluations / f"version_{version:06d}.jsonl")

    def tokens_of(self, step: int, process: str) -> Path:
        """Return the file in which a process, such as trainer.rank0, records a step's tokens."""
        return self.tokens / f"step_{step:06d}.{process}.parquet"

    def clear_process_files(self) -> None:
        """Delete the files that processes of an earlier start left, and incomplete checkpoints."""
        self.private.clear()
        left = (self.failures, self.statuses, self.warnings, self.endpoints, self.stop_request)
        for path in (*left, *self.checkpoints.glob(".step_*")):
            remove(path)

    def clear_model_files(self, keep: str | None) -> None:
        """Delete the built model and the warm start, except a folder that contains `keep`."""
        kept = Path(keep).expanduser().resolve() if keep else None
        for path in (self.built_model, self.warm_start):
            if kept is None or not kept.is_relative_to(path.resolve()):
                remove(path)

    def initial_model(self) -> Path:
        return Path(self._model_lines()[0])

    @property
    def started_from(self) -> str:
        """The checkpoint used as initial model, as "<run name>, step 5"; "" for other models."""
        with suppress(OSError, ValueError):
            _, run, folder, checkpoint, _ = str(self.initial_model()).rsplit("/", 4)
            if folder == self.checkpoints.name:
                return f"{run}, step {step_of(Path(checkpoint))}"
        return ""

    def model_fingerprint(self) -> str:
        """Return the recorded fingerprint of the initial model, "" if none was recorded."""
        return self._model_lines()[1]

    def _model_lines(self) -> list[str]:
        lines = self.read(self._model).decode().split("\n")
        if len(lines) < 2:
            raise ValueError(f"{self._model} is damaged: restore it, or start a new run")
        return lines

    def set_model(self, folder: Path, fingerprint: str = "") -> None:
        write_atomically(self._model, f"{folder}\n{fingerprint}\n")

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:06d}"

    @staticmethod
    def state_of(checkpoint: Path) -> Path:
        """Return the file with a checkpoint's step and the state of the rollouts process."""
        return checkpoint / "state.json"

    @staticmethod
    def export_of(checkpoint: Path) -> Path:
        """Return the subfolder of a checkpoint with the model in Hugging Face format."""
        return checkpoint / "hf"

    def exports(self) -> list[Path]:
        """Return the exported models of the complete checkpoints, oldest first."""
        exports = map(self.export_of, self.complete_checkpoints())
        return [export for export in exports if export.is_dir()]

    def has_results(self) -> bool:
        """Return whether a run has left results, not only the files of a failed start."""
        was_logged = self.metrics.is_file() and self.metrics.stat().st_size > 0
        was_evaluated = (self.path / "summary.json").is_file()  # evaluate.py writes this file
        was_searched = self.evaluated.is_file()  # optimize_prompt.py writes no summary.json
        is_saved = any(self.checkpoints.glob("step_*"))
        return was_logged or was_evaluated or was_searched or is_saved

    def complete_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, oldest first, without copies that the user renamed."""
        found = self.checkpoints.glob("step_[0-9]*")  # a leading dot marks an incomplete checkpoint
        return sorted((c for c in found if c == self.checkpoint(step_of(c))), key=step_of)

    def num_saved_steps(self) -> int:
        complete = self.complete_checkpoints()
        return step_of(complete[-1]) if complete else 0

    def resume_point(self) -> ResumePoint | None:
        """Return the newest complete checkpoint, or None. Raise ValueError for a damaged state."""
        complete = self.complete_checkpoints()
        if not complete:
            return None
        with naming_damage(self.state_of(complete[-1])) as path:
            state = load_json(self.read(path))
            return ResumePoint(int(state["step"]), complete[-1], {**state["rollouts"]})


class UnusableFile(ValueError):
    """An error whose message names a file and a remedy. `naming_damage` does not change it."""


@contextmanager
def naming_damage(path: Path, remedy: str = "delete its checkpoint") -> Iterator[Path]:
    """Convert an error in the block, which reads `path`, into an UnusableFile that names `path`.

    Do not convert errors of memory, disk or imports, because then the file may be intact.
    """
    try:
        yield path
    except UnusableFile:
        raise
    except Exception as error:  # because torch and msgspec raise their own error types
        text = f"{type(error).__name__}: {error}"
        # pyarrow raises OSError without errno for a damaged file. A missing file counts as damaged.
        is_of_system = getattr(error, "errno", None) not in (None, errno.ENOENT)
        if is_of_system or isinstance(error, ImportError) or re.search(OUT_OF_MEMORY, text):
            raise
        raise UnusableFile(f"{path} is damaged ({text}): {remedy}") from error


def read_records(path: Path, lines: Iterable[bytes] | None = None) -> list[dict[str, Any]]:
    """Parse all `lines` of a file of JSON objects. Raise ValueError for a damaged line."""
    records = []
    lines = regular_file(path, path.parent).read_bytes().splitlines() if lines is None else lines
    for number, line in enumerate(lines, 1):
        with naming_damage(path, f"restore it, or delete its line {number}"):
            records.append({**load_json(line)})
    return records


def _create_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def step_of(path: Path) -> int:
    """Return the number in a file name, such as 12 for step_000012 or .version_000012.jsonl."""
    number = _NUMBERED.match(path.name)
    if not number:
        raise ValueError(f"the name of {path} has no step or version, such as step_000012")
    return int(number[1])


def drop_steps_from(run_folder: RunFolder, step: int) -> None:
    """From `step` on, move rollouts to rollouts.dropped. Delete tokens and later evaluations."""
    for path in _files_from(run_folder.rollouts, step):
        # Append to the dropped rollouts, because a step may be dropped more than once.
        with _create_parent(run_folder.dropped_rollouts / path.name).open("ab") as file:
            file.write(path.read_bytes())
        path.unlink()
    # Delete old results, because the viewer would show them until the run repeats the steps.
    later = _files_from(run_folder.evaluations, step + 1)  # that of `step` may not be due again
    for path in [*_files_from(run_folder.tokens, step), *later]:
        path.unlink()


def _files_from(folder: Path, step: int) -> list[Path]:
    """Return the folder's files whose number is >= `step`, including incomplete files."""
    numbered = [path for path in folder.glob("*") if _NUMBERED.match(path.name)]
    return [path for path in numbered if step_of(path) >= step]
