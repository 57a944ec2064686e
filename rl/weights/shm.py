"""All weights through memory: the trainer writes a file in memory, vLLM on the same host maps it.

Every byte is copied once. The file's path is in the trainer's folder of /proc, so vLLM must run as
the same user.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rl.weights.memory_file import read_weights
from rl.weights.transport import Reader, Sender


class FileReader(Reader):
    """Maps the trainer's file in memory."""

    def __init__(self, worker: int) -> None:
        """Every worker reads the whole file, so its number does not matter."""

    def read(self, fingerprint: str, *, path: str) -> dict[str, torch.Tensor]:
        """Return the weights in the file, mapped, so that nothing is copied before the load."""
        return read_weights(path, fingerprint)


@dataclass(kw_only=True)
class ShmSender(Sender):
    """conf/sync/shm.yaml."""

    reader: ClassVar[type[Reader]] = FileReader
    one_host: ClassVar[bool] = True
