"""The LoRA matrices alone: megabytes, exact, and vLLM adds them to a base that it loaded by itself.

A vLLM on our host maps them from a file in memory, any other gets them in the body of the request:
base64 within JSON, for vLLM's own route takes nothing else, and needs no folder that both see.

vLLM loads an adapter from a folder and could load the next one in place of it, but would then read
the files again at every step of every request. So it loads one once, from a folder that the end
inside of it writes, and pushes replace what is loaded.
"""

import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from safetensors.torch import load

from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.model.lora import adapter_form
from rl.weights.memory_file import MemoryFile, WrittenWeights, checked, read_weights
from rl.weights.transport import Weights

if TYPE_CHECKING:
    from rl.learner.policy import Policy

_ELSEWHERE = Path("/tmp")  # of a host whose folders we do not know
_CONFIG, _MATRICES = "adapter_config.json", "adapter_model.safetensors"


class AdapterSender:
    """Gives each replica the matrices in the way that it can take."""

    def __init__(self) -> None:
        self._file, self._written = MemoryFile(), WrittenWeights("", "")
        self._form: dict[str, Any] = {}

    def collect(self, policy: "Policy") -> Weights:
        """Return what is trained under peft's names, on rank 0. Collective."""
        self._form = self._form or adapter_form(policy.engine.module.model)
        return policy.adapter_weights()

    def pack(self, weights: Weights) -> str:
        """Write them over the last ones; return their fingerprint."""
        self._written = self._file.write(weights)
        return self._written.fingerprint

    def connect(self, vllm: VLLMRoutes) -> None:
        """Make vLLM know the adapter's name and form."""
        socket = vllm.replica.address.path
        # A name that nobody can have made a folder of before.
        folder = (socket.parent if socket else _ELSEWHERE) / f"offbyone-adapter-{uuid4().hex}"
        facts = {"form": self._form, "folder": str(folder), **self._update(vllm)}
        # Never finished: finishing an update makes vLLM drop all adapters.
        vllm.start_update()
        vllm.init_transfer({"transport": "adapter", "facts": facts})
        vllm.load_adapter(SERVED_AS["adapter"], folder)

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        """Have vLLM replace the matrices that it holds."""
        vllm.update(self._update(vllm))
        vllm.set_version(version)

    def release(self) -> None:
        """Nothing: what is packed next is written over it."""

    def _update(self, vllm: VLLMRoutes) -> dict[str, Any]:
        if vllm.replica.address.path:  # only processes of one host meet at a Unix socket
            where = {"path": self._written.path}
        else:
            where = {"content": b64encode(self._file.content).decode()}
        return {"fingerprint": self._written.fingerprint, "where": where}


class AdapterReader:
    """Reads the matrices, and has the first ones in a folder until vLLM has loaded them."""

    def __init__(
        self,
        worker: int,
        *,
        form: dict[str, Any],
        folder: str,
        fingerprint: str,
        where: dict[str, str],
    ) -> None:
        """`form`: adapter_config.json; the rest as in an update."""
        self.form, self._folder = form, Path(folder)
        self._wrote = worker == 0  # all workers of a vLLM share a host
        if self._wrote:
            content = _bytes_at(**where)
            checked(load(content), fingerprint)
            self._folder.mkdir(mode=0o700)
            (self._folder / _CONFIG).write_text(json.dumps(form))
            (self._folder / _MATRICES).write_bytes(content)

    def read(self, mark: str, **where: str) -> dict[str, torch.Tensor]:
        """Return the matrices, mapped or taken from the request."""
        if self._wrote:  # and vLLM has loaded it by now
            (self._folder / _CONFIG).unlink()
            (self._folder / _MATRICES).unlink()
            self._folder.rmdir()
            self._wrote = False
        if path := where.get("path"):
            return read_weights(path, mark)
        return checked(load(_bytes_at(**where)), mark)

    def close(self) -> None:
        """Nothing is held open."""


def _bytes_at(*, path: str = "", content: str = "") -> bytes:
    return Path(path).read_bytes() if path else b64decode(content)
