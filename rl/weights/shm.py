"""Through memory: the trainer writes into a file in memory, vLLM on the same host maps it.

Every byte is copied once. The path leads through the trainer's entry in /proc, so the other end
must be the same user's.
"""

import torch

from rl.inference.routes import VLLMRoutes
from rl.weights.memory_file import MemoryFile, WrittenWeights, read_weights
from rl.weights.transport import Weights, WholeWeights, load_whole


class ShmSender(WholeWeights):
    """Holds the weights where vLLM can see them."""

    def __init__(self) -> None:
        self._file, self._written = MemoryFile(), WrittenWeights("", "")

    def pack(self, weights: Weights) -> str:
        """Write them over the last ones, which nobody maps any more; return their fingerprint."""
        self._written = self._file.write(weights)
        return self._written.fingerprint

    def connect(self, vllm: VLLMRoutes) -> None:
        """Nothing to agree on: each push names its file."""
        vllm.init_transfer({"transport": "shm", "facts": {}})

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Have vLLM map and load them."""
        load_whole(vllm, version, self._written.fingerprint, {"path": self._written.path})


class FileReader:
    """Maps a file, in memory or on a disk."""

    def __init__(self, worker: int) -> None:
        """Each worker of a vLLM reads it by itself, so all are alike."""

    def read(self, mark: str, *, path: str) -> dict[str, torch.Tensor]:
        """Return what lies there, mapped, so that nothing is copied before it is loaded."""
        return read_weights(path, mark)

    def close(self) -> None:
        """Nothing is held open."""
