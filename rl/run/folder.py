"""Where everything of a run lies: the one place that knows the names of its files."""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.run.private_folder import PrivateFolder
from rl.run.whole_files import remove

_NUMBERED = re.compile(r"\.?(?:step|version)_([0-9]+)")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resumed run starts from."""

    step: int  # the next step, which is also the policy version
    folder: Path
    rollouts: dict[str, Any]  # state of the dispatcher


@dataclass(frozen=True)
class RunFolder:
    """Paths below the folder of a run."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def lock(self) -> Path:
        """Locked by the supervisor for as long as the run lasts; holds its process id."""
        return self.path / "lock"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        """What the command line changed, and which file of each group was chosen."""
        return self.path / "overrides.yaml"

    @property
    def versions(self) -> Path:
        """The version of every installed package."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        """The numbers, one line a step."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """Output of each process."""
        return self.path / "logs"

    def log_of(self, part: str) -> Path:
        """Output of one process: inference, rollouts, trainer.rank0, ..."""
        return self.logs / f"{part}.log"

    @property
    def statuses(self) -> Path:
        """What each process is doing, one file per process."""
        return self.path / "status"

    @property
    def warnings(self) -> Path:
        """What each process warned of, one file per process."""
        return self.path / "warnings"

    @property
    def failures(self) -> Path:
        """Why a process could not go on, one file per process."""
        return self.path / "failures"

    @property
    def wandb_id(self) -> Path:
        """What Weights & Biases knows the run by."""
        return self.path / "wandb_id.txt"

    @property
    def tensorboard(self) -> Path:
        """What TensorBoard reads."""
        return self.path / "tensorboard"

    @property
    def stop_request(self) -> Path:
        """Where this file is, the trainer saves after the present step and ends."""
        return self.path / "stop"

    @property
    def commands(self) -> Path:
        """How to start each part, where somebody does so by hand."""
        return self.path / "commands.txt"

    @property
    def over(self) -> Path:
        """Where this file is, parts that were started by hand end themselves."""
        return self.path / "over"

    @property
    def dropped_metrics(self) -> Path:
        """Lines of steps that were done, lost for want of a checkpoint, and done again."""
        return self.path / "metrics.dropped.jsonl"

    @property
    def warm_start(self) -> Path:
        """The run that makes the model this one starts from, while it lasts."""
        return self.path / "warm-start"

    @property
    def built_model(self) -> Path:
        """Where a model that is built here is built."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint, complete or absent."""
        return self.path / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """Every rollout, one file a step."""
        return self.path / "rollouts"

    @property
    def dropped_rollouts(self) -> Path:
        """Those of steps that were done, lost for want of a checkpoint, and done again."""
        return self.path / "rollouts.dropped"

    def rollouts_of(self, step: int) -> Path:
        """Every rollout of a step, one JSON object a line."""
        path = self.rollouts / f"step_{step:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def tokens(self) -> Path:
        """What is recorded of single tokens (token_files.py)."""
        return self.path / "tokens"

    def tokens_of(self, step: int, part: str) -> Path:
        """What one process, rollouts or trainer.rank0, recorded of the tokens of a step."""
        return self.tokens / f"step_{step:06d}.{part}.parquet"

    def evaluation_of(self, version: int) -> Path:
        """Every rollout of the evaluation of a policy version, one JSON object a line."""
        path = self.evaluations / f"version_{version:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def evaluations(self) -> Path:
        """The rollouts of every evaluation."""
        return self.path / "evaluations"

    @property
    def evaluated(self) -> Path:
        """The rollouts of an evaluation that is a run of its own."""
        return self.path / "rollouts.jsonl"

    def pushed_weights(self, folder: str | None) -> Path:
        """Where weights lie that vLLM is about to load; `folder` may be shared by any runs."""
        if folder is None:
            return self.path / "weights"
        mark = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:8]
        return Path(folder).expanduser() / f"{self.name}-{mark}"

    @property
    def viewer_index(self) -> Path:
        """What view.py remembers of the run, alone in its folder."""
        return self.path / "viewer" / "index.duckdb"

    def endpoint_of(self, part: str) -> Path:
        """Where a part listens (endpoint.py)."""
        return self.endpoints / f"{part}.json"

    def restart_request_of(self, part: str) -> Path:
        """Why somebody wants a part to be started again."""
        return self.endpoints / f"{part}.restart"

    @property
    def endpoints(self) -> Path:
        """Where each part listens, one file per part."""
        return self.path / "endpoints"

    @property
    def private(self) -> PrivateFolder:
        """Its sockets, keys and temporary files."""
        return PrivateFolder(self.path / "sockets")

    def clear_processes(self) -> None:
        """Delete what the processes of the run before have left."""
        self.private.clear()
        left = (self.failures, self.statuses, self.warnings, self.endpoints, self.stop_request)
        for path in (*left, self.commands, self.over):
            remove(path)
        # A process that was killed while it wrote a checkpoint, or deleted one, cleared nothing.
        for path in self.checkpoints.glob(".step_*"):
            remove(path)

    def clear_preparations(self, but: str | None) -> None:
        """Delete what a start that failed prepared, unless the model's folder `but` is in it."""
        kept = Path(but).expanduser().resolve() if but else None
        for path in (self.built_model, self.warm_start):
            if kept is None or not kept.is_relative_to(path.resolve()):
                remove(path)

    def model(self) -> Path:
        """The local folder of the model that the run starts from."""
        return Path(self._model.read_text().split("\n")[0])

    def model_fingerprint(self) -> str:
        """What was recorded of the model's content, nothing where nothing was."""
        return self._model.read_text().split("\n")[1]

    def set_model(self, folder: Path, fingerprint: str = "") -> None:
        """Record the local folder of the model, and what tells its content from any other."""
        self._model.write_text(f"{folder}\n{fingerprint}\n")

    @property
    def _model(self) -> Path:
        return self.path / "model.txt"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:06d}"

    @staticmethod
    def state_of(checkpoint: Path) -> Path:
        """The step, and what the rollouts process goes on with."""
        return checkpoint / "state.json"

    @staticmethod
    def export_of(checkpoint: Path) -> Path:
        """The model of a checkpoint, for everybody else."""
        return checkpoint / "hf"

    def exports(self) -> list[Path]:
        """The models of the complete checkpoints, oldest first."""
        exports = map(self.export_of, self.complete_checkpoints())
        return [export for export in exports if export.is_dir()]

    def complete_checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first (incomplete ones have another name)."""
        complete = self.checkpoints.glob("step_[0-9]*")
        return sorted(complete, key=step_of)

    def num_saved_steps(self) -> int:
        """Steps behind the newest complete checkpoint, 0 without one."""
        complete = self.complete_checkpoints()
        return step_of(complete[-1]) if complete else 0

    def resumed(self) -> ResumePoint | None:
        """The newest complete checkpoint, None for a fresh run."""
        complete = self.complete_checkpoints()
        if not complete:
            return None
        state = json.loads(self.state_of(complete[-1]).read_text())
        return ResumePoint(step=state["step"], folder=complete[-1], rollouts=state["rollouts"])


def step_of(path: Path) -> int:
    """12 for step_000012, .version_000012.jsonl, step_000012.trainer.rank0.parquet.

    Raises:
        ValueError: the name has no number.

    """
    number = _NUMBERED.match(path.name)
    if not number:
        raise ValueError(f"no step and no version: {path}")
    return int(number[1])
