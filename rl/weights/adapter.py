"""The LoRA matrices alone: megabytes, exact, because vLLM adds them to a base that it has loaded.

A vLLM on the trainer's host maps them from a file in memory. Any other vLLM gets them in the body
of the request, in base64 because vLLM's route takes JSON, and needs no shared folder.

vLLM loads an adapter from a folder. If it loaded each version that way, it would read the files
again at every step of every request. So it loads a folder once, which the reader writes, and later
pushes replace the matrices in memory.
"""

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import torch
from safetensors.torch import load

from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.model.lora import adapter_form
from rl.weights.memory_file import checked, read_weights
from rl.weights.transport import Reader, Sender, Weights

if TYPE_CHECKING:
    from rl.learner.policy import Policy

_REMOTE_FOLDER = Path("/tmp")  # on another host, whose folders the trainer does not know
_CONFIG, _MATRICES = "adapter_config.json", "adapter_model.safetensors"


class AdapterReader(Reader):
    """Reads the matrices; keeps the first ones in a folder until vLLM has loaded them."""

    def __init__(
        self,
        worker: int,
        *,
        form: dict[str, Any],
        folder: str,
        fingerprint: str,
        source: dict[str, str],
    ) -> None:
        """`form` is adapter_config.json; `fingerprint` and `source` are those of an update."""
        self.form, self._folder = form, Path(folder)
        self._has_folder = worker == 0  # all workers of a vLLM share a host
        if self._has_folder:
            content = _bytes_of(**source)
            checked(load(content), fingerprint)
            self._folder.mkdir(mode=0o700)
            (self._folder / _CONFIG).write_text(json.dumps(form))
            (self._folder / _MATRICES).write_bytes(content)

    def read(self, fingerprint: str, **source: str) -> dict[str, torch.Tensor]:
        """Return the matrices, mapped or from the request."""
        if self._has_folder:  # vLLM has loaded it before the first update
            (self._folder / _CONFIG).unlink()
            (self._folder / _MATRICES).unlink()
            self._folder.rmdir()
            self._has_folder = False
        if path := source.get("path"):
            return read_weights(path, fingerprint)
        return checked(load(_bytes_of(**source)), fingerprint)


@dataclass(kw_only=True)
class AdapterSender(Sender):
    """conf/sync/adapter.yaml."""

    reader: ClassVar[type[Reader]] = AdapterReader
    adapter_only: ClassVar[bool] = True

    def collect(self, policy: "Policy") -> Weights:
        """Return the trained matrices under peft's names, on rank 0. Collective."""
        self._form = adapter_form(policy.engine.module.model)
        return policy.adapter_weights()

    def connect(self, vllm: VLLMRoutes) -> None:
        """Make vLLM load an adapter of this form, under its name."""
        socket = vllm.replica.address.path
        # The name is random, so another user cannot have created the folder before.
        folder = (socket.parent if socket else _REMOTE_FOLDER) / f"offbyone-adapter-{uuid4().hex}"
        # This update is never finished, because vLLM drops all adapters when an update finishes.
        vllm.start_update()
        self.open_readers(vllm, {"form": self._form, "folder": str(folder), **self.update(vllm)})
        vllm.load_adapter(SERVED_AS[True], folder)

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:
        """Return a path for a vLLM on this host, the bytes for any other."""
        if vllm.replica.address.path:  # a Unix socket connects processes of one host only
            return {"path": self._file.path}
        return {"content": b64encode(self._file.content).decode()}

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Have vLLM replace the matrices that it holds."""
        vllm.update(self.update(vllm))
        vllm.set_version(version)


def _bytes_of(*, path: str = "", content: str = "") -> bytes:
    return Path(path).read_bytes() if path else b64decode(content)
