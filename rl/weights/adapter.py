"""Push only the LoRA matrices, because vLLM has already loaded the base model.

A vLLM with a Unix socket maps the matrices from the trainer's memory file. Any other vLLM receives
them in the request (base64, because the route accepts only JSON) and needs no shared folder.

vLLM loads an adapter only from a folder. Its option to load a folder again (load_inplace) would
read the files at every step of every request. So the reader of worker 0 writes only the first
version to a folder, which vLLM loads once. Later pushes replace the matrices in vLLM's memory.
"""

import json
import shutil
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import torch
from safetensors.torch import load

from rl.inference.routes import VLLMRoutes
from rl.inference.server import SERVED_AS
from rl.model.lora import peft_config
from rl.weights.memory_file import read_weights, require_fingerprint
from rl.weights.transport import Reader, Sender, Weights

if TYPE_CHECKING:
    from rl.learner.policy import Policy

_CONFIG, _MATRICES = "adapter_config.json", "adapter_model.safetensors"


class AdapterReader(Reader):
    """The receiver of LoRA matrices. Worker 0 also writes those of the first push to a folder."""

    def __init__(
        self,
        worker: int,
        *,
        form: dict[str, Any],
        folder: str,
        fingerprint: str,
        source: dict[str, str],
    ) -> None:
        """In worker 0, write an adapter (config `form`, matrices of `source`) to `folder`."""
        self._folder = Path(folder)
        if worker == 0:
            content = _matrix_bytes(**source)
            require_fingerprint(load(content), fingerprint)
            self._folder.mkdir(mode=0o700)
            (self._folder / _CONFIG).write_text(json.dumps(form))
            (self._folder / _MATRICES).write_bytes(content)

    def read(self, fingerprint: str, **source: str) -> dict[str, torch.Tensor]:
        shutil.rmtree(self._folder, ignore_errors=True)  # vLLM has already loaded this folder
        if path := source.get("path"):
            return read_weights(path, fingerprint)
        return require_fingerprint(load(_matrix_bytes(**source)), fingerprint)


@dataclass(kw_only=True)
class AdapterSender(Sender):
    """The sender of LoRA matrices (conf/sync/adapter.yaml)."""

    reader: ClassVar[type[Reader]] = AdapterReader
    adapter_only: ClassVar[bool] = True

    def collect(self, policy: "Policy") -> Weights:
        self._form = peft_config(policy.engine.module.model)
        return policy.adapter_weights()

    def connect(self, vllm: VLLMRoutes) -> None:
        """Make vLLM load the current adapter from a folder, which the reader writes."""
        socket = vllm.replica.address.path
        # The name is random, so that no other user can have created the folder before.
        folder = (socket.parent if socket else Path("/tmp")) / f"offbyone-adapter-{uuid4().hex}"
        # Never finish this update, because vLLM drops all adapters at the end of an update.
        vllm.start_update()
        self.open_readers(vllm, {"form": self._form, "folder": str(folder), **self.push_info(vllm)})
        vllm.load_adapter(SERVED_AS[True], folder)

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:
        if vllm.replica.address.path:  # a vLLM with a Unix socket runs on this host
            return {"path": self._file.path}
        return {"content": self._file.content}

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        vllm.update(self.push_info(vllm))
        vllm.set_version(version)


def _matrix_bytes(*, path: str = "", content: str = "") -> bytes:
    return Path(path).read_bytes() if path else b64decode(content)
