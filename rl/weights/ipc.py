"""Push all weights to vLLM on the same host by CUDA IPC. Tested on one GPU, but not with vLLM.

The trainer packs the weights into a buffer on its GPU. Each worker of vLLM opens the handle of the
buffer once, and reads later pushes through it. vLLM 0.32's IPCWeightTransferEngine is not
used, because its request over HTTP contains a pickle. This module sends the handle as plain JSON.

PyTorch expects exactly one process to open and close a shared buffer. If more workers open it, the
buffer may stay allocated until the trainer ends.
"""

import os
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rl.inference.routes import VLLMRoutes
from rl.weights.packed import PackedSender, unpack
from rl.weights.transport import Reader

# torch.UntypedStorage._share_cuda_ returns GPU, memory handle, size and offset in bytes, handle and
# offset of a reference counter, event handle, whether to wait for the event. The trainer sends the
# three handles as base64 strings, because JSON cannot contain bytes.
_HANDLE_TYPES = (int, str, int, int, str, int, str, bool)


def decode(handle: list[Any]) -> tuple[Any, ...]:
    """Return the values of a handle from a request. Raise RuntimeError if a type is wrong."""
    if tuple(map(type, handle)) != _HANDLE_TYPES:
        raise RuntimeError(f"sync=ipc: {handle} is not a CUDA memory handle")
    return tuple(b64decode(one) if isinstance(one, str) else one for one in handle)


class IpcReader(Reader):
    """The receiver in a vLLM worker, which reads the memory of the trainer's GPU."""

    def __init__(self, worker: int) -> None:  # noqa: ARG002 each worker reads all weights
        self._handle, self._buffer = list[Any](), torch.empty(0)

    def read(
        self, fingerprint: str, *, handle: list[Any], **packed: Any
    ) -> dict[str, torch.Tensor]:
        if handle != self._handle:
            self._buffer, self._handle = self.map_memory(decode(handle)), handle
        return unpack(self._buffer, **packed, fingerprint=fingerprint)

    def map_memory(self, values: tuple[Any, ...]) -> torch.Tensor:
        """Map the memory of a handle into this process, and return it as bytes [N]."""
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *values[1:])
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(kw_only=True)
class IpcSender(PackedSender):
    """Sends weights through the memory of the trainer's GPU (conf/sync/ipc.yaml)."""

    reader: ClassVar[type[Reader]] = IpcReader
    one_host: ClassVar[bool] = True

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # To open an expandable segment, vLLM needs pidfd_getfd, which containers often forbid.
        use: Any = torch._C._accelerator_setAllocatorSettings
        use("expandable_segments:False")
        try:
            buffer = super().allocate(num_bytes)
        finally:
            use(os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:False"))
        self._handle = [
            b64encode(one).decode() if isinstance(one, bytes) else one for one in self.share(buffer)
        ]
        return buffer

    def share(self, buffer: torch.Tensor) -> tuple[Any, ...]:
        return buffer.untyped_storage()._share_cuda_()

    def source(self, vllm: VLLMRoutes) -> dict[str, Any]:
        return {"handle": self._handle, **super().source(vllm)}
