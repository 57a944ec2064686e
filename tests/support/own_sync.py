"""A user's own way to push weights: one file, named by `sync._target_`."""

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from safetensors.torch import load

from rl.inference.routes import VLLMRoutes
from rl.weights.memory_file import require_fingerprint
from rl.weights.transport import Reader, Sender


class RequestReader(Reader):
    """Takes all weights from the body of the request."""

    def __init__(self, worker: int, *, encoding: str) -> None:
        assert (worker, encoding) == (0, "base64")

    def read(self, fingerprint: str, *, content: str) -> dict[str, torch.Tensor]:
        """Return the decoded weights."""
        return require_fingerprint(load(b64decode(content)), fingerprint)


@dataclass(kw_only=True)
class RequestSender(Sender):
    """Sends all weights in the body of the request."""

    reader: ClassVar[type[Reader]] = RequestReader

    def connect(self, vllm: VLLMRoutes) -> None:
        """Tell the reader the encoding."""
        self.open_readers(vllm, {"encoding": "base64"})

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:
        """Return the bytes."""
        return {"content": b64encode(self._file.content).decode()}
