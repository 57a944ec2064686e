"""Where everything of a run lies."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LONGEST_SOCKET = 100  # bytes; the kernel takes 107


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

    @property
    def logs(self) -> Path:
        """Output of each process."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint, complete or absent."""
        return self.path / "checkpoints"

    def rollouts_of(self, step: int) -> Path:
        """Every rollout of a step, one JSON object a line."""
        path = self.path / "rollouts" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def evaluation_of(self, version: int) -> Path:
        """Every rollout of the evaluation of a policy version, one JSON object a line."""
        path = self.path / "evaluations" / f"version_{version:06d}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def vllm_socket(self) -> Path:
        """Where vLLM listens."""
        return self._sockets / "vllm.sock"

    @property
    def rollouts_socket(self) -> Path:
        """Where the rollouts process listens."""
        return self._sockets / "rollouts.sock"

    @property
    def _sockets(self) -> Path:
        return (self.path / "sockets").resolve()

    def make_sockets_folder(self) -> None:
        """Make the private folder of the sockets.

        Unix socket paths are short; below a deep folder it is a link to a short temporary one.
        """
        import tempfile

        folder = self.path / "sockets"
        if folder.is_symlink():
            folder.unlink()
        if len(os.fsencode(folder.resolve())) + 16 <= _LONGEST_SOCKET:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(tempfile.mkdtemp(prefix="offbyone-"))
        for path in (self.vllm_socket, self.rollouts_socket):
            path.unlink(missing_ok=True)

    def remove_sockets_folder(self) -> None:
        """Delete it, and the temporary folder that it may be a link to."""
        import shutil

        folder = self.path / "sockets"
        shutil.rmtree(folder.resolve(), ignore_errors=True)
        if folder.is_symlink():
            folder.unlink()

    def model(self) -> Path:
        """The local folder of the model that the run starts from."""
        return Path((self.path / "model.txt").read_text().strip())

    def set_model(self, folder: Path) -> None:
        """Record the local folder of the model."""
        (self.path / "model.txt").write_text(f"{folder}\n")

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step_{step:06d}"

    def complete_checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first (incomplete ones have another name)."""
        return sorted(self.checkpoints.glob("step_[0-9]*"))

    def resumed(self) -> ResumePoint | None:
        """The newest complete checkpoint, None for a fresh run."""
        complete = self.complete_checkpoints()
        if not complete:
            return None
        state = json.loads((complete[-1] / "state.json").read_text())
        return ResumePoint(step=state["step"], folder=complete[-1], rollouts=state["rollouts"])
