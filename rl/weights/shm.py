"""Push all weights through shared memory: vLLM on the same host maps a file of the trainer.

The file's path is in the trainer's folder of /proc, so vLLM must run as the same user.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rl.weights.memory_file import read_weights
from rl.weights.transport import Reader, Sender


class FileReader(Reader):
    """The receiver in a vLLM worker, which maps the trainer's memory file."""

    def __init__(self, worker: int) -> None:
        """Ignore the worker's number, because every worker reads the whole file."""

    def read(self, fingerprint: str, *, path: str) -> dict[str, torch.Tensor]:
        return read_weights(path, fingerprint)


@dataclass(kw_only=True)
class ShmSender(Sender):
    """Sends weights through shared memory (conf/sync/shm.yaml)."""

    reader: ClassVar[type[Reader]] = FileReader
    one_host: ClassVar[bool] = True
